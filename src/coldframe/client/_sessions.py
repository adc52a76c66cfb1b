"""What both SDKs ask of one session, on the event loop; its logic is the node's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coldframe.client._requests import checked
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.ids import check_operation_id, new_operation_id
from coldframe.protocol.models import ExecResult, SessionExecRequest, SessionInfo, SessionRequest

if TYPE_CHECKING:
    from coldframe.client._core import ClientCore
    from coldframe.client._requests import Env


def session_request(
    shell: str,
    *,
    env: Env | None,
    cwd: str | bytes | None,
    user: str | int | None,
    spool_bytes: int,
    operation_id: str | None,
) -> SessionRequest:
    """Make the request of a session; it always carries an id.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return checked(
        SessionRequest,
        {
            "shell": shell,
            "env": dict(env or {}),
            "cwd": cwd,
            "user": user,
            "spool_bytes": spool_bytes,
            "operation_id": _identified(operation_id),
        },
    )


def _identified(operation_id: str | None) -> str:
    return new_operation_id() if operation_id is None else check_operation_id(operation_id)


class SessionCore:
    """One session that is there."""

    def __init__(self, core: ClientCore, info: SessionInfo, window_bytes: int) -> None:
        self._core, self.info, self._window_bytes = core, info, window_bytes

    @classmethod
    async def start(
        cls, core: ClientCore, sandbox_id: str, request: SessionRequest, window_bytes: int
    ) -> SessionCore:
        """Start one; who is cancelled meanwhile leaves none."""
        link = await core.link()
        try:
            info = await link.sessions().create(sandbox_id, request)
        except asyncio.CancelledError:
            assert request.operation_id is not None
            with contextlib.suppress(ColdframeError):
                await link.sessions().close(request.operation_id, kill=True)
            raise
        return cls(core, info, window_bytes)

    @classmethod
    async def attach(cls, core: ClientCore, session_id: str, window_bytes: int) -> SessionCore:
        """Find one that was started before."""
        return cls(core, await (await core.link()).sessions().get(session_id), window_bytes)

    async def exec(
        self,
        command: str | bytes,
        env: Mapping[str, str] | None,
        deadline_s: float | None,
        window_bytes: int | None,
        operation_id: str | None,
    ) -> ExecResult:
        """Run one command line; who is cancelled meanwhile ends it."""
        asked = checked(
            SessionExecRequest,
            {
                "command": command,
                "env": dict(env or {}),
                "deadline_s": deadline_s,
                "window_bytes": self._window_bytes if window_bytes is None else window_bytes,
                "operation_id": _identified(operation_id),
            },
        )
        link = await self._core.link()
        try:
            told = await link.sessions().exec(self.info.id, asked)
        except asyncio.CancelledError:
            assert asked.operation_id is not None
            with contextlib.suppress(ColdframeError):
                await link.cancel_exec(asked.operation_id)
            raise
        self.info = self.info.model_copy(update={"ended": told.ended})
        return told.result

    async def refresh(self) -> SessionInfo:
        """Ask what is known of it now."""
        self.info = await (await self._core.link()).sessions().get(self.info.id)
        return self.info

    async def close(self, *, kill: bool) -> None:
        """End the shell; with `kill` everything that it started, too."""
        self.info = await (await self._core.link()).sessions().close(self.info.id, kill=kill)
