"""What becomes of a request to a service that is gone, or may not be asked."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldframe.client import _calls
from coldframe.client._calls import call
from coldframe.client._connection import Address, Answer
from coldframe.client._http import Http
from coldframe.protocol.errors import NotPermittedError, ServiceUnreachableError


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


class RestartedTwice(Http):
    """Nobody listens; then who does is killed with the request in hand; then it is answered."""

    failures = 8

    async def request(self, *asked: Any, **options: Any) -> Answer:
        self.failures -= 1
        if self.failures > 0:
            return await super().request(*asked, **options)
        if self.failures == 0:
            raise self._lost(ConnectionResetError("reset by peer"))
        return Answer(200, {}, (), b"back")


async def test_request_that_meets_two_restarts_is_answered(
    held: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tries that the first one took are not those that are left for the second."""
    monkeypatch.setattr(_calls, "_PAUSES_S", (0.01,) * 5)
    http = RestartedTwice(Address(*held.getsockname()), ())

    answer = await call(http, "GET", "/", known=True)

    assert answer.body == b"back"
    http.close()


@pytest.mark.root
async def test_socket_that_may_not_be_connected_to_says_who_may(tmp_path: Path) -> None:
    """To start another service is of no use to who may not ask the one that is there."""
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(tmp_path / "n.sock"))
        served.listen()
        (tmp_path / "n.sock").chmod(0o600)
        http = Http(Address("localhost", unix=tmp_path / "n.sock"), ())
        os.seteuid(65534)
        try:
            with pytest.raises(NotPermittedError, match="is for root and the user who serves it"):
                await call(http, "GET", "/")
        finally:
            os.seteuid(0)
            http.close()
