"""Sessions of a node behind a service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote

from coldframe.client._connection import Answer
from coldframe.client._remote_execs import sandbox_path
from coldframe.protocol import wire
from coldframe.protocol.models import SessionExecRequest, SessionInfo, SessionRequest, SessionResult

_POLL_S = 30.0
_MARGIN_S = 60.0
"""How much longer than its poll an answer may take before its connection counts as lost."""


class RemoteSessions:
    """See `SessionAccess`."""

    def __init__(self, call: Callable[..., Awaitable[Answer]]) -> None:
        self._call = call

    async def create(self, sandbox_id: str, request: SessionRequest, /) -> SessionInfo:
        target = f"{sandbox_path(sandbox_id)}/sessions"
        answer = await self._call("POST", target, wire.dump(request), within_s=_MARGIN_S)
        return wire.load(SessionInfo, answer.body)

    async def list(self, sandbox_id: str, /) -> tuple[SessionInfo, ...]:
        answer = await self._call("GET", f"{sandbox_path(sandbox_id)}/sessions")
        return wire.load_all(SessionInfo, answer.body)

    async def get(self, session_id: str, /) -> SessionInfo:
        return wire.load(SessionInfo, (await self._call("GET", _session(session_id))).body)

    async def exec(self, session_id: str, asked: SessionExecRequest, /) -> SessionResult:
        target, body = f"{_session(session_id)}/execs?wait_s={_POLL_S:g}", wire.dump(asked)
        while True:  # the same id again waits for the same command
            answer = await self._call("POST", target, body, within_s=_POLL_S + _MARGIN_S)
            if answer.status == 200:
                return wire.load(SessionResult, answer.body)

    async def close(self, session_id: str, /, *, kill: bool = False) -> SessionInfo:
        target = f"{_session(session_id)}?kill={str(kill).lower()}"
        answer = await self._call("DELETE", target, within_s=_MARGIN_S)
        return wire.load(SessionInfo, answer.body)


def _session(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"
