"""URLs of ports: what signs them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coldframe.gateway.tickets import Ticket, Tickets
from coldframe.protocol.errors import CapabilityError, PortUrlInvalidError


def test_secret_that_is_not_whole_signs_nothing(tmp_path: Path) -> None:
    """With an empty one, as a loss of power may leave it, anybody could make URLs."""
    ticket = Ticket("sb-aaaaaa-aaaaaaaaaa", 80, int(time.time()) + 60)
    token = Tickets(tmp_path).issue(ticket)
    assert Tickets(tmp_path).read(token) == ticket

    for cut in (b"", b"short"):
        (tmp_path / "ports.key").write_bytes(cut)
        with pytest.raises(CapabilityError, match=r"ports\.key has .* remove it"):
            Tickets(tmp_path).issue(ticket)
        with pytest.raises(PortUrlInvalidError):
            Tickets(tmp_path).read(token)

    (tmp_path / "ports.key").unlink()
    with pytest.raises(PortUrlInvalidError):
        Tickets(tmp_path).read(token)
