"""What a batch is asked to do, checked before anything runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coldframe.harnesses import load_harness
from coldframe.harnesses.base import Limits, ModelSettings
from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.redaction import redact_url

MAX_CONCURRENCY = 4096


@dataclass(frozen=True)
class RunConfig:
    """What a batch is asked to do."""

    tasks: tuple[Path, ...]
    harness: str
    samples: int = 1
    concurrency: int = 2
    """Attempts at a time. Changes no result, so a resumed run may choose another."""
    attempts: int = 2
    """Tries of one sample at most, the first included."""
    limits: Limits = field(default_factory=Limits)
    model: ModelSettings | None = None
    api_key_env: str | None = None
    seed: int | None = None
    capture: str | None = None
    """How much of the model's answers is captured, by whatever `Batch` is given for that."""

    def __post_init__(self) -> None:
        for name in ("samples", "concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name}: {getattr(self, name)} is less than 1")
        if self.concurrency > MAX_CONCURRENCY:
            raise InvalidRequestError(f"concurrency: {self.concurrency} is over {MAX_CONCURRENCY}")
        harness = load_harness(self.harness)
        if harness.needs_model and self.model is None:
            raise InvalidRequestError(
                f"harness {self.harness!r} needs a model: give --model and --base-url"
            )

    def asked(self) -> dict[str, Any]:
        """Return what defines the run's results, without secrets, as JSON."""
        model = None
        if self.model is not None:
            model = {k: v for k, v in asdict(self.model).items() if k != "api_key"}
            model |= {"base_url": redact_url(self.model.base_url), "api_key_env": self.api_key_env}
        return {
            "tasks": [str(path.resolve()) for path in self.tasks],
            "harness": self.harness,
            "samples": self.samples,
            "attempts": self.attempts,
            "limits": asdict(self.limits),
            "model": model,
            "seed": self.seed,
            **({} if self.capture is None else {"capture": self.capture}),
        }
