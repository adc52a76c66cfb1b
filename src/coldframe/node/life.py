"""The life of a sandbox as the node keeps it: states, versions, what each state refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coldframe.host.outcome import Undertaking
from coldframe.protocol import tracing
from coldframe.protocol.errors import (
    ColdframeError,
    ConflictError,
    SandboxGoneError,
    SandboxStateError,
)
from coldframe.protocol.models import ImageStart, SandboxInfo, SandboxSpec, SandboxState
from coldframe.runtimes.base import SandboxHandle

if TYPE_CHECKING:
    from coldframe.node.operations import ExecOperation
    from coldframe.node.session import Session

_S = SandboxState
_NOTHING = ImageStart()
LINGERING_LOOK = 32
"""With so many commands that left something running it is looked whether that has ended."""
NEXT: dict[SandboxState, frozenset[SandboxState]] = {
    _S.REQUESTED: frozenset({_S.PROVISIONING, _S.FAILED}),
    _S.PROVISIONING: frozenset({_S.READY, _S.FAILED}),
    _S.READY: frozenset({_S.PAUSED, _S.TERMINATING, _S.LOST}),
    _S.PAUSED: frozenset({_S.READY, _S.TERMINATING, _S.LOST}),
    _S.TERMINATING: frozenset({_S.DELETED}),
    _S.DELETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.LOST: frozenset(),
}
"""Every transition there is."""

LEASE_ENDED = "its lease ended"
_MADE_VERSION = 3
"""After requested, provisioning, ready."""
ENDED = frozenset({_S.DELETED, _S.FAILED, _S.LOST})
_RUNNING = frozenset({_S.READY, _S.PAUSED})


@dataclass(eq=False, slots=True)
class Sandbox:
    """The node's record of one sandbox."""

    id: str
    node_id: str
    runtime: str
    spec: SandboxSpec
    image_digest: str = ""
    layer_digests: tuple[str, ...] = ()
    image_start: ImageStart = _NOTHING
    workdir: str = "/"
    state: SandboxState = SandboxState.REQUESTED
    version: int = 1
    created_at: float = field(default_factory=time.time)
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    expired: bool = False
    kept_until: float | None = None
    reason: str | None = None
    handle: SandboxHandle | None = None
    queued_s: float = 0.0
    """How long its create waited for its turn."""
    operation_id: str | None = None
    """Of its create."""
    asked: SandboxSpec | None = None
    """What its create asked for, where `spec` says something else by now."""
    presence: str | None = None
    """Of the client with which it is to end; see `Presences`."""
    process: str | None = None
    """Of that client."""
    claimed: bool = False
    """Whether somebody knows its id, or can ask for it: then it outlives the node's process."""
    creating: Undertaking[SandboxInfo] | None = None
    ending: asyncio.Task[None] | None = None
    lease: asyncio.TimerHandle | None = None
    execs: dict[str, ExecOperation] = field(default_factory=dict)
    """Operations that have not ended."""
    lingering: dict[str, ExecOperation] = field(default_factory=dict)
    """Ended operations that left processes running, whose output goes on."""
    sessions: dict[str, Session] = field(default_factory=dict)
    """By the operation ids of their shells."""
    look_at: int = LINGERING_LOOK
    """With how many of them it is looked again which have nothing running any more."""
    tampering_told: int = 0
    """How many refusals of the present guard events were made of."""
    watchers: list[asyncio.Future[None]] = field(default_factory=list)
    """Of those that wait for its next transition."""
    held: int = 0
    """What its environment counts for in its owner's share while it lives."""
    spool_bytes: int = 0
    """What the output of its commands counts for, beyond their results."""
    trace_id: str | None = field(default_factory=tracing.current)
    """Of the request that made it."""
    tell: Callable[[Sandbox], None] = lambda _: None
    """Told of each transition."""

    def info(self) -> SandboxInfo:
        """What the world may know of it."""
        return SandboxInfo.whole(
            id=self.id,
            node_id=self.node_id,
            runtime=self.runtime,
            spec=self.spec,
            image_digest=self.image_digest,
            layer_digests=self.layer_digests,
            image_start=self.image_start,
            workdir=self.workdir,
            state=self.state,
            version=self.version,
            created_at=self.created_at,
            ready_at=self.ready_at,
            ended_at=self.ended_at,
            expires_at=self.expires_at,
            expired=self.expired,
            kept_until=self.kept_until,
            queued_s=self.queued_s,
            reason=self.reason,
            trace_id=self.trace_id,
        )

    def as_made(self) -> SandboxInfo:
        """What its create was answered with."""
        return self.info().model_copy(
            update={
                "spec": self.asked or self.spec,
                "state": SandboxState.READY,
                "version": _MADE_VERSION,
                "ended_at": None,
                "expired": False,
                "kept_until": None,
                "reason": None,
            }
        )

    @property
    def ended(self) -> bool:
        """Whether it is in a final state."""
        return self.state in ENDED

    @property
    def running(self) -> bool:
        """Whether it was made, and nothing has begun to end it."""
        return self.state in _RUNNING

    @property
    def owner(self) -> str | None:
        """Whose it is, if its labels say so."""
        return self.spec.owner

    async def moved(self) -> None:
        """Return after the next transition."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watchers.append(turn)
        try:
            await turn
        finally:
            if turn in self.watchers:
                self.watchers.remove(turn)

    def move(self, state: SandboxState, reason: str | None = None) -> None:
        """Make a transition and raise the version.

        Raises:
            SandboxStateError: there is no such transition.
        """
        if state not in NEXT[self.state]:
            raise SandboxStateError(f"sandbox {self.id!r} cannot go from {self.state} to {state}")
        self.state = state
        self.version += 1
        self.reason = reason or self.reason
        if state is SandboxState.READY and self.ready_at is None:
            self.ready_at = time.time()
        if state in ENDED:
            self.ended_at = time.time()
        self.tell(self)
        watchers, self.watchers = self.watchers, []
        for turn in watchers:
            if not turn.done():
                turn.set_result(None)

    def refusal(self) -> ColdframeError | None:
        """Why it takes no operation now; None when it does."""
        if self.state is SandboxState.READY:
            return None
        why = f": {self.reason}" if self.reason else ""
        if self.kept_until is not None:
            why += f"; it can be read for {max(0.0, self.kept_until - time.time()):.0f} s more"
        if self.state is SandboxState.DELETED:
            how = f"expired: {self.reason or LEASE_ENDED}" if self.expired else "was deleted"
            return SandboxGoneError(f"sandbox {self.id!r} {how}")
        if self.state is SandboxState.LOST:
            return SandboxGoneError(f"sandbox {self.id!r} was lost{why}")
        return SandboxStateError(f"sandbox {self.id!r} is {self.state}{why}")

    def require_ready(self, expected_version: int | None = None) -> SandboxHandle:
        """Return the handle if operations are taken.

        Raises:
            SandboxStateError, SandboxGoneError: they are not.
            ConflictError: the version is another than expected.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        self.require_version(expected_version)
        assert self.handle is not None
        return self.handle

    def require_readable(self) -> SandboxHandle:
        """Return the handle for looking at what is there, which a kept sandbox still allows.

        Raises:
            SandboxStateError, SandboxGoneError: there is nothing to look at.
        """
        if self.kept_until is not None and self.handle is not None and self.ending is None:
            return self.handle
        return self.require_ready()

    def require_version(self, expected: int | None) -> None:
        """Refuse when the sandbox has moved on.

        Raises:
            ConflictError: the version is another than expected.
        """
        if expected is not None and expected != self.version:
            raise ConflictError(
                f"sandbox {self.id!r} is at version {self.version}, not {expected}: it has moved on"
            )
