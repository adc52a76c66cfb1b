"""The short way of commands: the answer leaves in the moment of the result, and leaves once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from coldframe.gateway.app import make_app
from coldframe.gateway.context import Service
from coldframe.gateway.express import Express
from coldframe.gateway.guard import Guard, by_socket
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import OperationNotFoundError
from coldframe.protocol.models import SandboxSpec


class Caller:
    """One request, and what is sent for it; a send waits while `open` is not set."""

    def __init__(self, sandbox_id: str, body: dict[str, Any], query: bytes = b"") -> None:
        self.body = json.dumps(body).encode()
        self.sent: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        path = f"/v1/sandboxes/{sandbox_id}/execs"
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [(b"content-length", str(len(self.body)).encode())],
        }

    async def receive(self) -> dict[str, Any]:
        """The whole body."""
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Any) -> None:
        """As a connection that may be full."""
        await self.open.wait()
        self.sent.append(message)

    def answer(self) -> Any:
        """The body of what was sent."""
        assert [one["type"] for one in self.sent] == ["http.response.start", "http.response.body"]
        return json.loads(self.sent[1]["body"])


@pytest.mark.parametrize("full", [False, True])
async def test_answer_is_sent_once_whether_or_not_the_connection_takes_it(
    tmp_path: Path, full: bool
) -> None:
    """What is begun outside of the request's task must be ended by it."""
    async with Node(NodeSettings(home=tmp_path, runtime="fake")) as node:
        app = make_app(Service(node, cast(Any, None)))
        door = Guard(Express(app, app), by_socket)
        info = await node.create_sandbox(SandboxSpec(image="any"))
        caller = Caller(info.id, {"command": "echo once", "operation_id": "one"})
        if full:
            caller.open.clear()
        asking = asyncio.ensure_future(door(caller.scope, caller.receive, caller.send))
        await node_has(node, "one")
        if full:
            await asyncio.sleep(0.05)
            assert (caller.sent, asking.done()) == ([], False)
            caller.open.set()
        await asking
        assert caller.answer()["exit_code"] == 0

        again = Caller(info.id, {"command": "echo once", "operation_id": "one"})
        await door(again.scope, again.receive, again.send)
        assert again.answer() == caller.answer()

        slow = {"command": "sleep 0.2; echo late", "operation_id": "late"}
        late = Caller(info.id, slow, b"wait_s=0")
        await door(late.scope, late.receive, late.send)
        assert late.sent[0]["status"] == 202
        await node_has(node, "late")
        assert len(late.sent) == 2


async def node_has(node: Node, operation_id: str) -> None:
    """Return once a command has ended."""
    async with asyncio.timeout(20):
        while True:
            try:
                await node.wait_exec(operation_id)
            except OperationNotFoundError:
                await asyncio.sleep(0.01)
            else:
                return
