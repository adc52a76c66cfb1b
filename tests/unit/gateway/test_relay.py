"""What a gateway passes on, and as whom."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from coldframe.client._connection import Address
from coldframe.gateway.identity import Identity, Scope
from coldframe.gateway.relay import Relay
from coldframe.protocol.errors import Execution, ServiceUnreachableError
from coldframe.protocol.models import Quota


@dataclass
class _Head:
    status: int
    lines: Sequence[str]


class FakeUpstream:
    """Notes what it is sent, and answers as it is told."""

    address = Address("localhost")

    def __init__(self, *pieces: bytes | Exception, lines: Sequence[str] = ()) -> None:
        self.pieces, self.lines = pieces, lines
        self.sent: list[tuple[str, str, bytes | None]] = []
        self.headers: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        content: AsyncIterator[bytes] | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> AsyncIterator[tuple[Any, AsyncIterator[bytes]]]:
        body = None if content is None else b"".join([piece async for piece in content])
        self.sent.append((method, target, body))
        self.headers = dict(headers)
        if isinstance(self.pieces[0], Exception):
            raise self.pieces[0]

        async def answer() -> AsyncIterator[bytes]:
            for piece in self.pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece

        yield _Head(200, self.lines), answer()


class FakeQuotas:
    """One quota for everybody."""

    async def quota(self, owner: str) -> Quota:
        return Quota(sandboxes=len(owner))


def _caller(upstream: FakeUpstream, identity: Identity | None) -> httpx.AsyncClient:
    relay = Relay(upstream, FakeQuotas())

    async def known(scope: Any, receive: Any, send: Any) -> None:
        if identity is not None:
            scope.setdefault("state", {})["identity"] = identity
        await relay(scope, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(known), base_url="http://x")


AMBER = Identity("amber", frozenset({Scope.CREATE}), "k1")


async def test_request_is_passed_on_byte_by_byte_and_in_its_callers_name() -> None:
    """A path that is decoded on the way is another path; a caller's own claim is none."""
    upstream = FakeUpstream(b"one", b"two", lines=["Set-Cookie: a=1", "set-cookie: b=2"])
    headers = {
        "X-Kept": "yes",
        "Authorization": "Bearer secret",
        "Coldframe-On-Behalf": "root",
        "Connection": "x-kept",
    }
    async with _caller(upstream, AMBER) as caller:
        answer = await caller.put("/v1/a%2Fb%00?x=%ff&y=+", content=b"body", headers=headers)

    assert answer.content == b"onetwo"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert upstream.sent == [("PUT", "/v1/a%2Fb%00?x=%ff&y=+", b"body")]
    assert upstream.headers["x-kept"] == "yes"
    assert "authorization" not in upstream.headers
    behalf = json.loads(upstream.headers["coldframe-on-behalf"])
    assert behalf == {"owner": "amber", "scopes": ["create"], "name": "k1", "quota": None}


@pytest.mark.parametrize(("method", "path"), [("POST", "sandboxes"), ("GET", "resources")])
async def test_quota_goes_along_with_what_depends_on_it(method: str, path: str) -> None:
    """It is looked up for what it is needed for."""
    upstream = FakeUpstream(b"")
    async with _caller(upstream, AMBER) as caller:
        await caller.request(method, f"/v1/{path}", json={})
    assert json.loads(upstream.headers["coldframe-on-behalf"])["quota"]["sandboxes"] == len("amber")


async def test_what_needs_no_key_is_nobodys_and_not_the_gateways() -> None:
    """The gateway may do everything there; who is let in without a key may not."""
    upstream = FakeUpstream(b"")
    async with _caller(upstream, None) as caller:
        await caller.get("/healthz")
    behalf = json.loads(upstream.headers["coldframe-on-behalf"])
    assert (behalf["owner"], behalf["scopes"]) == ("nobody", [])


@pytest.mark.parametrize("execution", [Execution.NOT_EXECUTED, Execution.UNKNOWN])
async def test_node_that_does_not_answer_is_said_with_what_is_known(execution: Execution) -> None:
    """Whoever may ask again must know whether that does something twice."""
    upstream = FakeUpstream(ServiceUnreachableError("gone", execution=execution))
    async with _caller(upstream, AMBER) as caller:
        answer = await caller.post("/v1/x", content=b"1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["execution"] == execution
