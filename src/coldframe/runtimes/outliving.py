"""What a runtime may offer besides: its sandboxes and commands outlive the node's process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from coldframe.images.base import Image
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.runtimes.base import Gone, RunningExec, SandboxHandle


class Notes(Protocol):
    """What a node writes down for the one that comes after it; a runtime only keeps it."""

    def of_sandbox(self, sandbox_id: str) -> tuple[bytes, float | None]:
        """Return a note without line ends, and the Unix seconds at which the sandbox is to end."""

    def of_exec(self, sandbox_id: str, operation_id: str) -> bytes:
        """Return a note without line ends."""

    def give_up_exec(self, operation_ids: Collection[str]) -> str:
        """Return of which of these ended commands, oldest first, nothing is kept any more.

        There is no room for all of them.
        """


@dataclass(frozen=True)
class FoundSandbox:
    """A sandbox of the process that was here before."""

    id: str
    spec: SandboxSpec
    image: Image
    note: bytes
    handle: SandboxHandle | None
    """None: nothing of it is left."""
    gone: Gone | None = None
    """How it ended meanwhile, if it did so by itself."""


@dataclass(frozen=True)
class FoundExec:
    """A command of the process that was here before; it runs, or has ended."""

    sandbox_id: str
    operation_id: str
    note: bytes
    request: ExecRequest
    """As the runtime was asked, with everything filled in."""
    running: RunningExec
    ended_at: float | None
    """Unix seconds; None: it runs."""
    more: bytes | None
    """What was last noted besides, by `Keeps.note_exec`."""


@dataclass(frozen=True)
class Found:
    """All that was found, oldest first."""

    sandboxes: tuple[FoundSandbox, ...] = ()
    execs: tuple[FoundExec, ...] = ()
    complete: bool = True
    """False: some of what kept them has died with them."""


class NothingFoundError(Exception):
    """Nothing of the process that was here before is left to go on with."""


class Keeps(Protocol):
    """What a runtime keeps for the process that comes after this one, as the node tells it."""

    def note_sandbox(self, sandbox_id: str) -> None:
        """Ask for its note anew, also when it has ended."""

    def note_exec(self, operation_id: str, more: bytes, due_at: float | None = None) -> None:
        """Keep this, too, with a command that has been started; it replaces what was before.

        At `due_at`, Unix seconds, it is killed as at a deadline if there is no process then, unless
        its status pipe has something that nobody has read.
        """

    def drop_sandbox(self, sandbox_id: str) -> None:
        """Keep nothing of an ended sandbox any more."""

    def drop_exec(self, operation_id: str) -> None:
        """Keep nothing of an ended command any more."""


@runtime_checkable
class Outlives(Protocol):
    """What a `Runtime` may offer besides: its sandboxes and commands outlive this process."""

    def outlive(self, notes: Notes, lock: int | None, grace_s: float) -> Keeps:
        """Called before `start`: from now on nothing ends with this process.

        Args:
            lock: descriptor of the lock that says that the node lives, to be held as long as any
                sandbox may; None: go on with what the process before has left. `start` then raises
                NothingFoundError if there is nothing, VersionMismatchError if it cannot.
            grace_s: how long everything waits for the next process before it ends.
        """

    def lock(self) -> int:
        """The lock, once started; as it was given or found."""

    @property
    def found(self) -> Found:
        """What was found by `start`."""

    async def leave(self) -> None:
        """Close, and end nothing."""
