"""The commands of a node behind a service."""

from __future__ import annotations

import json
import re
from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from coldframe.client._calls import call, once
from coldframe.client._connection import Answer
from coldframe.client._http import Headers, Http
from coldframe.protocol import wire
from coldframe.protocol.errors import OperationNotFoundError, SandboxNotFoundError
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecRequest, ExecResult, OutputChunk, SignalScope, Stream
from coldframe.protocol.text import excerpt

M = TypeVar("M", bound=BaseModel)

POLL_S = 30.0
MARGIN_S = 30.0
"""How much longer than its poll an answer may take before its connection counts as lost."""


class RemoteExecs:
    """See `NodeLink`, of which this is a part."""

    _id: str | None = None
    """What changes are made under; None: each under one of its own."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def exec(self, sandbox_id: str, request: ExecRequest, /) -> ExecResult:
        request = _identified(request)
        answer = await self._submit(sandbox_id, request, POLL_S)
        if answer.status == 202:
            assert request.operation_id is not None
            return await self.wait_exec(request.operation_id)
        return wire.load(ExecResult, answer.body)

    async def start_exec(self, sandbox_id: str, request: ExecRequest, /) -> str:
        request = _identified(request)
        assert request.operation_id is not None
        while not json.loads((await self._submit(sandbox_id, request, 0.0)).body)["started"]:
            pass
        return request.operation_id

    async def _submit(self, sandbox_id: str, request: ExecRequest, wait_s: float) -> Answer:
        target = f"{sandbox_path(sandbox_id)}/execs?wait_s={wait_s:g}"
        body = wire.dump(request)
        return await self._call("POST", target, body, within_s=POLL_S + MARGIN_S)

    async def wait_exec(self, operation_id: str, /) -> ExecResult:
        while True:
            answer = await self._poll(operation_id, POLL_S)
            if answer.status == 200:
                return wire.load(ExecResult, answer.body)

    async def poll_exec(self, operation_id: str, /) -> ExecResult | None:
        answer = await self._poll(operation_id, 0.0)
        return wire.load(ExecResult, answer.body) if answer.status == 200 else None

    async def _poll(self, operation_id: str, wait_s: float) -> Answer:
        target = f"{_exec(operation_id)}?wait_s={wait_s:g}"
        return await self._call("GET", target, within_s=wait_s + MARGIN_S)

    async def read_output(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool, /
    ) -> OutputChunk:
        wait_s = POLL_S if wait else 0.0
        most = min(max_bytes, 1 << 24)
        target = (
            f"{_exec(operation_id)}/output/{stream}"
            f"?cursor={cursor}&max_bytes={most}&wait_s={wait_s:g}"
        )
        while True:
            answer = await self._call("GET", target, within_s=POLL_S + MARGIN_S)
            chunk = wire.read_chunk(stream, answer.headers, answer.body)
            if not wait or chunk.data or chunk.eof or chunk.dropped_bytes:
                return chunk

    async def write_stdin(self, operation_id: str, data: bytes, /) -> None:
        await self._call("POST", f"{_exec(operation_id)}/stdin", data, once(self._id))

    async def close_stdin(self, operation_id: str, /) -> None:
        target = f"{_exec(operation_id)}/stdin?close=true"
        await self._call("POST", target, headers=once(self._id))

    async def signal(self, operation_id: str, signum: int, scope: SignalScope, /) -> int:
        body = json.dumps({"signal": signum, "scope": scope}).encode()
        target = f"{_exec(operation_id)}/signal"
        answer = await self._call("POST", target, body, once(self._id))
        return int(json.loads(answer.body)["reached"])

    async def cancel_exec(self, operation_id: str, /) -> None:
        target = f"{_exec(operation_id)}/cancel?wait_s={POLL_S:g}"
        while (await self._call("POST", target, within_s=2 * POLL_S + MARGIN_S)).status == 202:
            pass

    async def resize(self, operation_id: str, rows: int, cols: int, /) -> None:
        body = json.dumps({"rows": rows, "cols": cols}).encode()
        await self._call("PUT", f"{_exec(operation_id)}/terminal", body, once(self._id))

    async def mark(self, operation_id: str, /) -> tuple[int, int]:
        answer = await self._call("POST", f"{_exec(operation_id)}/mark")
        totals = json.loads(answer.body)
        return totals["stdout"], totals["stderr"]

    async def forget(self, operation_id: str, /) -> None:
        await self._call("DELETE", f"{_exec(operation_id)}/output")

    # --- requests ---------------------------------------------------------------------

    async def _get(self, kind: type[M], target: str) -> M:
        return wire.load(kind, (await self._call("GET", target)).body)

    async def _call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        within_s: float | None = None,
    ) -> Answer:
        return await call(
            self._http,
            method,
            target,
            body,
            headers,
            within_s=within_s,
            known=True,
        )


def _identified(request: ExecRequest) -> ExecRequest:
    if request.operation_id is not None:
        return request
    return request.model_copy(update={"operation_id": new_operation_id()})


def sandbox_path(id_or_name: str) -> str:
    """Where a sandbox is.

    Raises:
        SandboxNotFoundError: none is called that. Sent, a `/` would name another route.
    """
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", id_or_name):
        raise SandboxNotFoundError(f"no sandbox has the id or name {excerpt(id_or_name)}")
    return f"/v1/sandboxes/{id_or_name}"


def _exec(operation_id: str) -> str:
    if "/" in operation_id:
        raise OperationNotFoundError(f"no exec has the operation id {excerpt(operation_id)}")
    return f"/v1/execs/{quote(operation_id, safe='')}"
