"""What an image is to the rooms above: a named stack of read-only layers and a configuration.

Also the one thing that building needs from above: something that runs a step in a sandbox.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coldframe.protocol.models import ExecResult

Progress = Callable[[str], None]
"""Called with one line of text for people; may be called from a worker thread."""


def quiet(line: str) -> None:
    """Progress for those who want none."""


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of the processes that run on it."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/"
    user: str = "0"
    cmd: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()


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
    """What was built so far; its config is the one that the step runs with."""
    argv: tuple[str, ...] | None
    command: str | None
    """A command line for `/bin/sh -c`."""
    env: tuple[tuple[str, str], ...]
    workdir: str
    user: str
    """Name or id, optionally `user:group`."""
    deadline_s: float
    target: Path
    """An empty directory on the store's file system; owned by the builder."""


class RunStep(Protocol):
    """Runs one build step in a sandbox and hands back what it wrote."""

    async def __call__(self, step: BuildStep) -> ExecResult:
        """Run the step without a network; on exit code 0 fill `step.target`.

        What the step wrote is left in `target` in layer form: overlay whiteouts (character
        device 0:0), `trusted.overlay.opaque`, plain ids 0 to 65535. `target` itself takes
        the mode and owner of the step's `/`.

        A step that fails is a result, not an exception; a platform that fails raises
        ColdframeError. On either, the content of `target` is thrown away.
        """
