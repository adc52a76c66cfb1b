"""Faults of ours: the log has them whole, the caller a sentence, on every way to a route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from coldframe.gateway.app import make_app
from coldframe.gateway.context import Service
from coldframe.gateway.failures import Faultless
from coldframe.gateway.guard import Guard, by_socket
from coldframe.gateway.served import ServedNode
from coldframe.gateway.server import Doors, Listen
from coldframe.gateway.settings import GatewaySettings
from coldframe.gateway.store.sqlite import SqliteStore
from coldframe.gateway.tickets import Tickets
from coldframe.integrations.orchard.door import Orchard
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings


class Broken(Node):
    """A node with a fault."""

    async def exec(self, *_: Any, **__: Any) -> Any:
        """Fail as nobody foresaw."""
        raise ZeroDivisionError("secret detail")

    async def get(self, *_: Any) -> Any:
        """The same."""
        raise ZeroDivisionError("secret detail")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/sandboxes/sb-1/execs"), ("GET", "/v1/sandboxes/sb-1")]
)
async def test_fault_is_logged_whole_and_told_in_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    """Whoever runs the service needs the traceback; a stranger must not have it."""
    node = Broken(NodeSettings(home=tmp_path, runtime="fake"))
    app = make_app(Service(node, cast(Any, None)))
    transport = httpx.ASGITransport(Faultless(Guard(app, by_socket)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as caller:
        answer = await caller.request(method, path, json={"command": "true"})

    assert answer.status_code == 500
    assert answer.headers["connection"] == "close"  # as the server does after a fault
    assert (answer.json()["code"], answer.json()["execution"]) == ("internal", "perhaps_executed")
    assert "secret" not in answer.text
    assert caplog.text.count("ZeroDivisionError: secret detail") == 1


class BrokenStore(SqliteStore):
    """Keys, with a fault."""

    broken = False

    async def keyless(self) -> bool:
        """Fail as nobody foresaw, once there is a service."""
        if self.broken:
            raise ZeroDivisionError("secret detail")
        return await super().keyless()


class BrokenTickets(Tickets):
    """URLs of ports, with a fault."""

    def read(self, *_: Any) -> Any:
        """Fail as nobody foresaw."""
        raise ZeroDivisionError("secret detail")


@dataclass
class Faulty:
    """A service in this process, on TCP, whose door has a fault."""

    at: Listen
    audit: Path

    async def ask(self, method: str, path: str, *headers: str) -> tuple[str, dict[str, Any]]:
        """Send a request; return the answer's head, and its body as JSON."""
        reader, writer = await asyncio.open_connection(self.at.host, self.at.port)
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(20):
            answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return head, json.loads(body)

    def noted(self) -> dict[str, Any]:
        """The last line of the audit log."""
        last: dict[str, Any] = json.loads(self.audit.read_bytes().splitlines()[-1])
        return last


@pytest.fixture
async def faulty(tmp_path: Path) -> AsyncIterator[Faulty]:
    """One that answers Orchard's clients, too."""
    settings = GatewaySettings(audit=tmp_path / "audit")
    store = BrokenStore(f"sqlite:{tmp_path}/keys.sqlite")
    async with Node(NodeSettings(home=tmp_path, runtime="fake")) as node:
        served = ServedNode(node, store, settings)
        served.service.tickets = BrokenTickets(tmp_path)
        doors = Doors(served, store, settings, Orchard(served.service))
        at = await doors.open_tcp(Listen("127.0.0.1", 0))
        store.broken = True
        try:
            yield Faulty(at, tmp_path / "audit/audit.jsonl")
        finally:
            await doors.close()


_TO_WEBSOCKET = (
    *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/sandboxes", ()),
        ("DELETE", "/v1/sandboxes/sb-1", ()),
        ("POST", "/v1/sandboxes/sb-1/execs", ("Content-Length: 0",)),
        ("GET", "/no/such/route", ()),
        ("GET", "/sandboxes", ()),
        ("GET", "/v1/execs/one/attach", _TO_WEBSOCKET),
        ("GET", "/p/token/", ()),
        ("GET", "/p/token/", _TO_WEBSOCKET),
    ],
)
async def test_fault_at_the_door_is_answered_and_noted_as_any_other(
    faulty: Faulty,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    headers: tuple[str, ...],
) -> None:
    """A client knows errors of ours alone, and an audit log without the answer would mislead."""
    head, told = await faulty.ask(method, path, *headers)

    assert head.startswith("HTTP/1.1 500 ")
    assert "connection: close" in head.lower()
    assert (told["code"], told["execution"]) == ("internal", "perhaps_executed")
    assert "secret" not in str(told)
    assert caplog.text.count("ZeroDivisionError: secret detail") == 1
    if not path.startswith("/p/"):  # of these it has refusals alone
        assert faulty.noted()["status"] == 500
