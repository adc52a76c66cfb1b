"""Which requests, and which connections that came to none, become lines of the audit log."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldframe.gateway.audit import AuditLog, entry
from coldframe.gateway.identity import Identity
from coldframe.gateway.routes import UNKNOWN, Routes
from coldframe.protocol import tracing

log = logging.getLogger("coldframe.gateway")

REFUSED = "refused"
"""What a request's state has when an application for strangers has refused it."""
_LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
_LONGEST = 64
_REFUSALS_PER_S = 10.0
_REFUSALS_AT_ONCE = 100.0
_CALLERS = 1024
_WEBSOCKET_REFUSED, _WEBSOCKET_OPEN = 403, 101


class Bounded:
    """Lets each caller's refusals through at a bounded pace, and counts the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._callers: OrderedDict[str, tuple[float, float, int]] = OrderedDict()
        """By caller: what is left, since when, how many were left out."""

    def admit(self, caller: str) -> int | None:
        """Return how many were left out since the last that was let through; None: leave it out."""
        now = self._clock()
        left, since, omitted = self._callers.pop(caller, (_REFUSALS_AT_ONCE, now, 0))
        left = min(_REFUSALS_AT_ONCE, left + (now - since) * _REFUSALS_PER_S)
        passed = left >= 1.0
        self._callers[caller] = (left - 1.0, now, 0) if passed else (left, now, omitted + 1)
        if len(self._callers) > _CALLERS:
            self._callers.popitem(last=False)
        return omitted if passed else None


class Paced(logging.Filter):
    """Lets each kind of warning of a logger through at the same pace."""

    def __init__(self) -> None:
        super().__init__()
        self._bounded = Bounded()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged."""
        return record.levelno > logging.WARNING or self._bounded.admit(str(record.msg)) is not None


class Auditor:
    """Writes what one service answers, on whatever door."""

    def __init__(self, entries: AuditLog | None, routes: Routes) -> None:
        """Take a log (None: nothing is written) and what requests are for."""
        self._entries, self._routes = entries, routes
        self._refusals = Bounded()

    def over(self, app: ASGIApp, *, only_refused: bool = False) -> ASGIApp:
        """Return an application whose changes and refusals are written.

        With `only_refused` nothing but what it marks as `REFUSED`: the rest is what a sandbox says.
        """
        return app if self._entries is None else _Audited(app, self, only_refused)

    def close(self) -> None:
        """Close the log."""
        if self._entries is not None:
            self._entries.close()

    def note(self, scope: Scope, status: int | None, trace: str | None) -> None:
        """Write how a request of a trace is answered; None: it is not."""
        if self._entries is None:
            return
        refused = status is not None and status >= 400
        method = scope.get("method", "WEBSOCKET")[:_LONGEST]
        if not refused and method in _LOOKS:
            return
        state = scope.get("state") or {}
        identity: Identity | None = state.get("identity")
        peer = (scope.get("client") or ("unix",))[0] or "unix"
        omitted = 0
        if refused:
            admitted = self._refusals.admit(peer if identity is None else identity.name)
            if admitted is None:
                return
            omitted = admitted
        template, sandbox = self._routes.find(scope)
        line = entry(
            trace=trace,
            key=None if identity is None else identity.name,
            owner=None if identity is None else identity.owner,
            method=method,
            route=template,
            sandbox=(state.get("sandbox") or sandbox)[:_LONGEST] or None,
            status=status,
            peer=peer,
        )
        self._write(line, omitted)
        if refused and identity is None:
            log.warning("%s refused: %s %s: %s", peer, method, template, status)

    def refused(self, peer: str, status: int) -> None:
        """Write that a connection was ended before it was a request."""
        omitted = self._refusals.admit(peer)
        if omitted is not None:
            self._write(entry(method=UNKNOWN, route=UNKNOWN, status=status, peer=peer), omitted)
            log.warning("%s refused: its connection came to no request: %d", peer, status)

    def _write(self, line: dict[str, object], omitted: int) -> None:
        if omitted:
            line["omitted"] = omitted
        if self._entries is not None:
            self._entries.write(line)


class _Audited:
    def __init__(self, app: ASGIApp, auditor: Auditor, only_refused: bool) -> None:
        self._app, self._auditor, self._only_refused = app, auditor, only_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; write a line when the answer begins, or when there will be none."""
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if status is None:
                status = _status(message)
                if status is not None:
                    self._note(scope, status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if status is None:
                self._note(scope, None)

    def _note(self, scope: Scope, status: int | None) -> None:
        refused = REFUSED in scope.get("state", ())
        if refused and status == _WEBSOCKET_OPEN:
            status = _WEBSOCKET_REFUSED  # opened only to be told why it is closed
        if refused or not self._only_refused:
            self._auditor.note(scope, status, tracing.current())


def _status(message: Message) -> int | None:
    kind = message["type"]
    if kind in {"http.response.start", "websocket.http.response.start"}:
        return int(message["status"])
    known = {"websocket.accept": _WEBSOCKET_OPEN, "websocket.close": _WEBSOCKET_REFUSED}
    return known.get(kind)
