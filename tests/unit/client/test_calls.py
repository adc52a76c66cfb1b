"""How long a request waits for a service that nobody serves any more."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from coldframe.client import _calls
from coldframe.client._calls import call
from coldframe.client._http import Address, Answer, Http
from coldframe.protocol.errors import ServiceUnreachableError


class Counted(Http):
    """Counts its requests."""

    requests = 0

    async def request(self, *asked: Any, **options: Any) -> Answer:
        self.requests += 1
        return await super().request(*asked, **options)


@pytest.fixture
def held() -> Iterator[socket.socket]:
    """An address of nobody else's, at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


@pytest.fixture
def away(held: socket.socket) -> Iterator[Counted]:
    """A client of that address."""
    http = Counted(Address(*held.getsockname()), ())
    yield http
    http.close()


async def test_service_that_stays_away_is_waited_for_once(
    away: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each step of closing a client waits anew for a service that is gone for good."""
    monkeypatch.setattr(_calls, "_PAUSES_S", (0.01,) * 5)
    monkeypatch.setattr(_calls, "_RESTART_S", 0.5)
    tries = []
    for _ in range(3):
        before = away.requests
        with pytest.raises(ServiceUnreachableError, match="no service answers"):
            await call(away, "GET", "/", known=True)
        tries.append(away.requests - before)

    assert tries[0] > 6
    assert tries[1:] == [6, 6]
    assert away.refused_s > 0.5


async def test_service_that_came_back_is_waited_for_again(
    away: Counted, held: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next restart has its whole time, however long the last one took."""
    monkeypatch.setattr(_calls, "_PAUSES_S", (0.01,) * 5)
    with pytest.raises(ServiceUnreachableError):
        await call(away, "GET", "/")
    assert away.refused_s > 0

    held.listen()
    (await away._connection()).close()

    assert away.refused_s == 0
