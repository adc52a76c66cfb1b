"""Keys by themselves: what is looked at before anybody is let in."""

from __future__ import annotations

import hmac

import pytest

from coldframe.gateway.identity import Scope
from coldframe.gateway.keys import authenticate, create_key, revoke_key
from coldframe.gateway.store.fake import FakeStore
from coldframe.protocol.errors import NotAuthenticatedError


async def test_every_key_is_compared_whole_and_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who measures how long a refusal takes must learn neither ids nor secrets by it."""
    store = FakeStore("fake:keys")
    good, revoked = [await create_key(store, "amber", {Scope.READ}) for _ in range(2)]
    await revoke_key(store, revoked)
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    unknown = f"cf_{'0' * 12}_{'0' * 64}"
    nearly = good[:-1] + ("0" if good[-1] != "0" else "1")
    for wrong in (revoked, unknown, nearly, "cf_short", "x" * 5000):
        with pytest.raises(NotAuthenticatedError, match="unknown, wrong or revoked"):
            await authenticate(store, f"Bearer {wrong}")
    assert (await authenticate(store, f"bearer {good}")).owner == "amber"
    assert compared == [(32, 32)] * 6
