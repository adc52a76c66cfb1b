"""Orchard's terminal: a command on a pty by WebSocket, JSON frames with data in base64."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal as signals
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from coldframe.gateway.audited import REFUSED
from coldframe.gateway.context import enter
from coldframe.gateway.identity import Scope
from coldframe.gateway.tenants import Tenant
from coldframe.integrations.orchard.jobs import argvs
from coldframe.integrations.orchard.words import Init
from coldframe.protocol import strict_json, wire
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    InvalidRequestError,
    NotPermittedError,
    SandboxNotFoundError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecRequest, PtySize, SandboxState, SignalScope

router = APIRouter()

UNAUTHORIZED, NOT_FOUND, NOT_READY, UNAVAILABLE = 4401, 4404, 4409, 4503
_BAD_INIT, _NOT_STARTED = 4400, 4500
_INIT_S = 10.0
_PIECE = 1 << 16
_END_S = 5.0
"""How long a command may take to end by itself once nobody is there any more."""
_SIGNALS = frozenset({"TERM", "KILL", "INT", "HUP", "QUIT"})


async def refuse(socket: WebSocket, code: int) -> None:
    """Close with a code; only a connection that stands can tell one."""
    socket.scope.setdefault("state", {})[REFUSED] = True
    await _accept(socket)
    await socket.close(code)


async def _accept(socket: WebSocket) -> None:
    await socket.accept(subprotocol=socket.scope.get("state", {}).get("subprotocol"))


@router.websocket("/sandboxes/{sandbox_id}/exec/pty")
async def terminal(socket: WebSocket, sandbox_id: str) -> None:
    """Run a command on a terminal until it ends or the caller goes away."""
    try:
        tenant = enter(socket, Scope.EXEC)
        info = await tenant.get(sandbox_id)
    except NotPermittedError:
        await refuse(socket, UNAUTHORIZED)
        return
    except SandboxNotFoundError:
        await refuse(socket, NOT_FOUND)
        return
    if info.ended_at is not None:
        await refuse(socket, NOT_FOUND)
        return
    if info.state is not SandboxState.READY or info.kept_until is not None:
        await refuse(socket, NOT_READY)
        return
    await _accept(socket)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the caller has gone
        await _serve(socket, tenant, info.id)


async def _serve(socket: WebSocket, tenant: Tenant, inner: str) -> None:
    try:
        async with asyncio.timeout(_INIT_S):
            init = _init(await socket.receive_text())
    except TimeoutError:
        await _fail(socket, "init timeout", _BAD_INIT)
        return
    except InvalidRequestError as error:
        await _fail(socket, f"bad init frame: {error}", _BAD_INIT)
        return
    operation_id = tenant.operation(new_operation_id())
    try:
        await _start(tenant, inner, init, operation_id)
    except ColdframeError as error:
        code = UNAVAILABLE if isinstance(error, CapacityError) else _NOT_STARTED
        await _fail(socket, f"spawn failed: {error}", code)
        return
    hearing = asyncio.ensure_future(_hear(socket, tenant, operation_id))
    telling = asyncio.ensure_future(_tell(socket, tenant, inner, operation_id))
    try:
        await asyncio.wait({hearing, telling}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not telling.done():
            await asyncio.shield(_hang_up(tenant, operation_id))
            await asyncio.wait({telling}, timeout=_END_S)
        for task in (hearing, telling):
            task.cancel()
        await asyncio.gather(hearing, telling, return_exceptions=True)
    await socket.close()


def _init(text: str) -> Init:
    try:
        told = strict_json.parse(text)
    except strict_json.NotStrictError:
        told = None
    if not isinstance(told, dict) or told.get("type") != "init":
        raise InvalidRequestError("the first frame is of type init")
    given = {name: value for name, value in told.items() if value is not None}
    return wire.load(Init, json.dumps(given).encode())


async def _start(tenant: Tenant, inner: str, init: Init, operation_id: str) -> None:
    argv = argvs(init.cmd, login=init.login_shell)[0]
    try:
        request = ExecRequest(
            argv=argv,
            cwd=init.cwd,
            env=dict((init.env or {}).items()),
            deadline_s=None,
            stdin_open=True,
            pty=PtySize(rows=init.rows, cols=init.cols),
            operation_id=operation_id,
        )
    except ValueError as error:
        raise InvalidRequestError(wire.describe(error)) from error
    await tenant.node.start_exec(inner, request)


async def _tell(socket: WebSocket, tenant: Tenant, inner: str, operation_id: str) -> None:
    """Send what the terminal shows and how the command ended."""
    found = await tenant.node.processes(inner)
    pid = min((one.pid for one in found if one.operation_id == operation_id), default=None)
    await socket.send_json({"type": "ready", "pid": pid})
    cursor = 0
    try:
        while True:
            chunk = await tenant.node.read_output(operation_id, "stdout", cursor, _PIECE, True)
            if chunk.data:
                data = base64.b64encode(chunk.data).decode("ascii")
                await socket.send_json({"type": "stdout", "data": data})
            cursor = chunk.next_cursor
            if chunk.eof:
                break
        result = await tenant.node.wait_exec(operation_id)
    except ColdframeError as error:
        await socket.send_json({"type": "error", "message": str(error)})
        return
    code = result.exit_code if result.exit_code is not None else -(result.signal or 9)
    await socket.send_json({"type": "exit", "code": code})


async def _hear(socket: WebSocket, tenant: Tenant, operation_id: str) -> None:
    """Do what frames say; one that says nothing known is passed over. Returns on `close`."""
    while True:
        try:
            told = strict_json.parse(await socket.receive_text())
        except strict_json.NotStrictError:
            continue
        except (WebSocketDisconnect, KeyError):
            return
        if not isinstance(told, dict):
            continue
        if told.get("type") == "close":
            return
        with contextlib.suppress(ColdframeError, ValueError, TypeError, KeyError):
            await _obey(tenant, operation_id, told)


async def _obey(tenant: Tenant, operation_id: str, told: dict[str, Any]) -> None:
    node = tenant.node
    if told["type"] == "stdin":
        data = base64.b64decode(told["data"], validate=True)
        if data:
            await node.write_stdin(operation_id, data)
    elif told["type"] == "signal":
        name = str(told.get("sig", "TERM")).upper()
        number = signals.Signals[f"SIG{name if name in _SIGNALS else 'TERM'}"]
        await node.signal(operation_id, number, SignalScope.GROUP)
    elif told["type"] == "resize":
        size = PtySize(rows=told["rows"], cols=told["cols"])
        await node.resize(operation_id, size.rows, size.cols)


async def _hang_up(tenant: Tenant, operation_id: str) -> None:
    """End a command that nobody watches, at the latest after `_END_S`."""
    with contextlib.suppress(ColdframeError):
        await tenant.node.signal(operation_id, signals.SIGTERM, SignalScope.TREE)
        await tenant.node.signal(operation_id, signals.SIGHUP, SignalScope.TREE)
        try:
            async with asyncio.timeout(_END_S):
                await tenant.node.wait_exec(operation_id)
        except TimeoutError:
            await tenant.node.signal(operation_id, signals.SIGKILL, SignalScope.TREE)


async def _fail(socket: WebSocket, message: str, code: int) -> None:
    await socket.send_json({"type": "error", "message": message})
    await socket.close(code)
