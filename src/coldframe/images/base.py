"""What an image is to the rooms above: a named stack of read-only layers and a configuration.

Also the one thing that building needs from above: something that runs a step in a sandbox.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coldframe.protocol.models import ExecResult
from coldframe.protocol.network import NetworkPolicy

Progress = Callable[[str], None]
"""Called with one line of text for people; may be called from a worker thread."""


def quiet(line: str) -> None:
    """Progress for those who want none."""


@dataclass(frozen=True)
class Healthcheck:
    """How to ask whether what runs in a container is well; times in seconds."""

    argv: tuple[str, ...]
    """Exit code 0: healthy."""
    interval_s: float = 30.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    """How long failures do not count after the start."""
    start_interval_s: float = 5.0
    """Between checks in the start period."""
    retries: int = 3
    """So many failures in a row: unhealthy."""


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of the processes that run on it. Command lines are argument vectors."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/"
    user: str = "0"
    cmd: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    shell: tuple[str, ...] = ()
    """What runs command lines; none: `/bin/sh -c`."""
    exposed_ports: tuple[str, ...] = ()
    """`PORT/tcp` or `PORT/udp`."""
    volumes: tuple[str, ...] = ()
    stop_signal: str | None = None
    healthcheck: Healthcheck | None = None
    on_build: tuple[str, ...] = ()
    """Instructions that a build on top of this image begins with."""


@dataclass(frozen=True)
class HistoryEntry:
    """One line of how an image came to be."""

    instruction: str
    """As it was written, variables not replaced; long ones are cut."""
    layer: str | None = None
    """The layer that it made."""
    resolved: str | None = None
    """Of FROM and COPY --from: the image's name in the store and its digest."""


@dataclass(frozen=True)
class Image:
    """A resolved image: read-only layers, top first, each a directory of the store."""

    name: str
    digest: str
    layers: tuple[str, ...]
    """Digests, top first; layer D's tree is `<layers directory>/<D>/root`."""
    config: ImageConfig


@dataclass(frozen=True)
class BuildStep:
    """One RUN line, ready to be run. Exactly one of `argv` and `command` is set."""

    image: Image
    """What was built so far, and above it what this step alone sees.

    Its config is the one that the step runs with.
    """
    argv: tuple[str, ...] | None
    command: str | None
    """A command line for `/bin/sh -c`."""
    env: tuple[tuple[str, str], ...]
    workdir: str
    user: str
    """Name or id, optionally `user:group`."""
    deadline_s: float
    network: NetworkPolicy
    target: Path
    """An empty directory on the store's file system; owned by the builder."""


@dataclass(frozen=True)
class StepResult:
    """What came of a step."""

    result: ExecResult
    refusals: tuple[str, ...] = ()
    """What the network policy refused, one sentence each, hosts named."""


class RunStep(Protocol):
    """Runs one build step in a sandbox and hands back what it wrote."""

    async def __call__(self, step: BuildStep) -> StepResult:
        """Run the step under its network policy; on exit code 0 fill `step.target`.

        What the step wrote is left in `target` in layer form: overlay whiteouts (character
        device 0:0), `trusted.overlay.opaque`, plain ids 0 to 65535. `target` itself takes
        the mode and owner of the step's `/`.

        A step that fails is a result, not an exception; a platform that fails raises
        ColdframeError. On either, the content of `target` is thrown away.
        """
