"""Leases of sandboxes: how long each lives, and what is still there to read for a while after."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable

from coldframe.node.background import Background
from coldframe.node.execs import Execs
from coldframe.node.legacy import Legacy
from coldframe.node.life import LEASE_ENDED, Sandbox
from coldframe.protocol.errors import ColdframeError, InvalidRequestError, SandboxGoneError
from coldframe.protocol.models import SandboxState

_RETRY_S = 5.0
_LONGEST_TTL_S = 10 * 365 * 86400.0


class Leases:
    """A timer for each sandbox that does not live for ever."""

    def __init__(
        self,
        quarantine_s: float,
        execs: Execs,
        legacy: Legacy,
        background: Background,
        end: Callable[[Sandbox], Awaitable[None]],
    ) -> None:
        """`end` ends a sandbox as expired, `quarantine_s` after its lease."""
        self._quarantine_s = quarantine_s
        self._execs, self._legacy = execs, legacy
        self._background, self._end = background, end

    def renew(self, sandbox: Sandbox, ttl_s: float | None) -> None:
        """Let the lease end `ttl_s` from now; None: never.

        Raises:
            InvalidRequestError: not a positive number, or more than ten years.
        """
        if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= _LONGEST_TTL_S):
            raise InvalidRequestError(f"ttl_s={ttl_s!r} is not above 0 and at most ten years")
        sandbox.expires_at = None if ttl_s is None else time.time() + ttl_s
        self.watch(sandbox)
        self._legacy.note(sandbox)

    def lapse(self, sandbox: Sandbox, why: str) -> None:
        """Let the lease end now, or as soon as it is made."""
        sandbox.expires_at, sandbox.reason = time.time(), why
        if sandbox.handle is not None:
            self.watch(sandbox)
        self._legacy.note(sandbox)

    def watch(self, sandbox: Sandbox) -> None:
        """End a sandbox, or what is kept of it, when its time has come."""
        self.let_be(sandbox)
        until = sandbox.kept_until or sandbox.expires_at
        if until is not None:
            self._expire_in(max(0.0, until - time.time()), sandbox)

    @staticmethod
    def let_be(sandbox: Sandbox) -> None:
        """Look after a sandbox no longer: it ends, or another process does."""
        if sandbox.lease is not None:
            sandbox.lease.cancel()
            sandbox.lease = None

    def expire(self, sandbox: Sandbox) -> None:
        """Its time has come."""
        if not sandbox.ended:
            self._background.spawn(self._expire(sandbox, sandbox.lease))

    def expire_one_kept(self, sandboxes: Iterable[Sandbox]) -> None:
        """Those that are only there to be read make room, the oldest first."""
        kept = [s for s in sandboxes if s.kept_until is not None and s.ending is None]
        if kept:
            self.expire(min(kept, key=lambda sandbox: sandbox.kept_until or 0.0))

    def _expire_in(self, seconds: float, sandbox: Sandbox) -> None:
        loop = asyncio.get_running_loop()
        sandbox.lease = loop.call_later(seconds, self.expire, sandbox)

    async def _expire(self, sandbox: Sandbox, lease: asyncio.TimerHandle | None) -> None:
        if sandbox.lease is not lease:  # it was renewed in this moment
            return
        try:
            if self._quarantine_s > 0 and sandbox.running:
                await self._keep(sandbox)
            else:
                await self._end(sandbox)
        except ColdframeError as error:
            self._background.note_fault(sandbox.id, error)
            self.let_be(sandbox)
            self._expire_in(_RETRY_S, sandbox)

    async def _keep(self, sandbox: Sandbox) -> None:
        """Stop what runs in a sandbox whose lease ended, and let it be read for a while."""
        handle = sandbox.handle
        assert handle is not None
        sandbox.expired = True
        sandbox.kept_until = time.time() + self._quarantine_s
        sandbox.move(SandboxState.TERMINATING, sandbox.reason or LEASE_ENDED)
        self._legacy.note(sandbox)
        self._execs.refuse_waiting(sandbox)
        self.watch(sandbox)
        with contextlib.suppress(SandboxGoneError):  # deleted meanwhile: nothing of it runs
            await handle.kill_processes(None)
