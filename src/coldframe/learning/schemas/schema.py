"""The declared file of a task set: what each part of a verdict means. Read strictly."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coldframe.learning.files import digest_of
from coldframe.protocol.errors import ColdframeError, Side

SCHEMA_FILE = "rewards.toml"
"""Lies beside the task directories of the set that it is for."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
FixtureCase = Literal[
    "right", "wrong", "empty", "huge", "nan", "missing_key", "verifier_error", "steering"
]
Key = Annotated[str, Field(min_length=1, max_length=200)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RewardSchemaError(ColdframeError):
    """A reward schema cannot be read; the message names file and field."""

    code = "reward_schema_refused"
    side = Side.CALLER


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Part(_Model):
    """One number of a verdict."""

    key: Key
    meaning: Annotated[str, Field(min_length=1)]
    direction: Literal["higher", "lower"]
    """Which is better."""
    range: Annotated[list[Finite], Field(min_length=2, max_length=2)]
    """Least and greatest; what lies outside is refused, never clipped."""
    unit: Annotated[str, Field(min_length=1)]
    missing: Literal["refuse", "leave_out"] = "refuse"
    """What a verdict without it comes to: none at all, or one in which its weight does not count.
    There is no rule by which a missing number becomes 0."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """In the mean. 0: kept beside the scalar and no part of it."""

    @field_validator("range")
    @classmethod
    def _ordered(cls, value: list[float]) -> list[float]:
        if not value[0] < value[1]:
            raise ValueError("the least comes before the greatest")
        return value


class Gate(_Model):
    """Unless the part reaches `at_least`, the scalar is `otherwise`."""

    key: Key
    at_least: Finite
    otherwise: Finite


class Veto(_Model):
    """If the part reaches `at_least`, the scalar is `gives`, whatever else there is."""

    key: Key
    at_least: Finite
    gives: Finite


class Fixture(_Model):
    """A verdict at the edge, and what must come of it.

    The verdict is that of a solution of a task of the set (`oracle`, `nop`, `wrong/NAME`), or
    what a verifier left in its reward file, or an error of the verifier.
    """

    case: FixtureCase
    task: str | None = None
    solution: str | None = None
    file: Literal["reward.json", "reward.txt"] = "reward.json"
    content: str | None = None
    error: str | None = None
    scalar: Finite | None = None
    refused: str | None = None
    """Words that the refusal has in it."""

    @model_validator(mode="after")
    def _complete(self) -> Fixture:
        if (self.task is None) != (self.solution is None):
            raise ValueError("task and solution go together")
        given = [one for one in (self.solution, self.content, self.error) if one is not None]
        if len(given) != 1:
            raise ValueError("has one of solution, content and error")
        if (self.scalar is None) == (self.refused is None):
            raise ValueError("has one of scalar and refused")
        return self


class RewardSchema(_Model):
    """What verdicts of a task set mean. A version never changes: its digest is recorded."""

    schema_version: Literal["coldframe.rewards/1"] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    version: Annotated[int, Field(ge=1)]
    scalarise: Literal["gated_mean@1"]
    """The function that makes the scalar."""
    code: dict[str, Digest]
    """By task key, SHA-256 of the tests that compute the verdict."""
    part: Annotated[list[Part], Field(min_length=1)]
    gate: list[Gate] = []
    veto: list[Veto] = []
    fixture: list[Fixture] = []

    @model_validator(mode="after")
    def _consistent(self) -> RewardSchema:
        keys = [part.key for part in self.part]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"part {twice!r} stands there twice")
        never_missing = {part.key for part in self.part if part.missing == "refuse"}
        for kind, key in [("gate", gate.key) for gate in self.gate] + [
            ("veto", veto.key) for veto in self.veto
        ]:
            if key not in never_missing:
                raise ValueError(f"{kind} {key!r}: is no part that is never missing")
        if not any(part.weight for part in self.part):
            raise ValueError("no part has a weight, so nothing makes the scalar")
        if not math.isfinite(math.fsum(part.weight for part in self.part)):
            raise ValueError("the weights add up to more than a number holds")
        return self

    @property
    def label(self) -> str:
        """Name and version, as `examples@1`."""
        return f"{self.name}@{self.version}"

    @property
    def digest(self) -> str:
        """SHA-256 of what decides about the scalar: all but fixtures and the tests' digests."""
        return digest_of(self.model_dump(mode="json", exclude={"fixture", "code"}))


def load_schema(path: Path) -> RewardSchema:
    """Read a schema.

    Raises:
        RewardSchemaError: it is not there, no TOML, or a field is missing, unknown or wrong.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        return RewardSchema.model_validate(data)
    except OSError as error:
        raise RewardSchemaError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in error.errors()
        )
        raise RewardSchemaError(f"{path}: {problems}") from error
    except ValueError as error:
        raise RewardSchemaError(f"{path}: not TOML: {error}") from error
