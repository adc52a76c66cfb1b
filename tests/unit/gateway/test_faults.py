"""Faults of ours: the log has them whole, the caller a sentence, on every way to a route."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from coldframe.gateway.app import make_app
from coldframe.gateway.context import Service
from coldframe.gateway.guard import Guard, by_socket
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
    transport = httpx.ASGITransport(Guard(app, by_socket), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as caller:
        answer = await caller.request(method, path, json={"command": "true"})

    assert answer.status_code == 500
    assert answer.headers["connection"] == "close"  # as the server does after a fault
    assert (answer.json()["code"], answer.json()["execution"]) == ("internal", "perhaps_executed")
    assert "secret" not in answer.text
    assert "ZeroDivisionError: secret detail" in caplog.text
