"""URLs of ports: what signs them."""

from __future__ import annotations

import string
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


def test_revoked_tokens_are_kept_until_they_expire_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever exposes and revokes for years must not slow each request, nor fill the disk."""
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    tickets, kept = Tickets(tmp_path), tmp_path / "ports.revoked"

    def revoked(expires_at: int) -> str:
        token = tickets.issue(Ticket("sb-aaaaaa-aaaaaaaaaa", 80, expires_at))
        tickets.revoke(token)
        return token

    lasting, short = revoked(1_000_900), revoked(1_000_100)
    assert len(kept.read_text().splitlines()) == 2
    now += 200
    last = revoked(1_000_901)

    assert len(kept.read_text().splitlines()) == 2
    for token in (lasting, short, last):
        for reader in (tickets, Tickets(tmp_path)):  # the same, after a restart
            with pytest.raises(PortUrlInvalidError):
                reader.read(token)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ports.key", "ports.revoked"]


def test_token_is_good_in_one_spelling_only(tmp_path: Path) -> None:
    """What is revoked is known by its spelling: another one of the same bytes would lead on."""
    tickets = Tickets(tmp_path)
    for name in ("sb-aaaaaa-aaaaaaaaaa", "sb-aaaaaa-aaaaaaaaaab", "sb-aaaaaa-aaaaaaaaaabb"):
        token = tickets.issue(Ticket(name, 80, int(time.time()) + 60))
        others = {token + more for more in ("=", "==", "\n", "A")}
        others |= {token[:-1] + last for last in string.ascii_letters + string.digits} - {token}
        assert tickets.read(token).sandbox_id == name
        for other in others:
            with pytest.raises(PortUrlInvalidError):
                tickets.read(other)
