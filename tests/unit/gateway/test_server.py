"""How TCP is listened on."""

from __future__ import annotations

import socket

from coldframe.gateway.server import Listen, _bound


def test_little_is_taken_for_a_client_that_does_not_read() -> None:
    """All that the kernel takes of a flood has to be read, encoded and copied first."""
    with _bound(Listen("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        served, _ = listener.accept()
        with served:
            served.setblocking(False)
            taken = 0
            try:
                while taken < 64 << 20:
                    taken += served.send(bytes(1 << 16))
            except BlockingIOError:
                pass

    assert taken <= 1 << 20
