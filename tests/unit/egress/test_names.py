"""What one sandbox may have the node remember and do for names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address

import pytest

from coldframe.host.egress import resolver
from coldframe.host.egress.resolver import Names, TooManyLookupsError
from tests.fixtures.waiting import until


async def nobody(name: str) -> Sequence[str]:
    """Knows no name."""
    return []


def test_memory_for_names_is_bounded_whatever_they_resolve_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who owns a name server answers millions of names with as many addresses."""
    monkeypatch.setattr(resolver, "_MOST_NAMES", 50)
    names = Names(nobody)
    for name in range(1000):
        for host in range(1, 101):
            names.pin(f"n{name}.example", ip_address(f"203.0.113.{host}"))

    held = sum(len(owners) for owners in names._owners.values())
    assert held == sum(len(known.told) for known in names._known.values()) == 50 * 64
    assert names.names_of(ip_address("203.0.113.1")) == ()
    assert names.names_of(ip_address("203.0.113.100"))[0] == "n999.example"


def test_name_keeps_the_addresses_that_it_was_told_before() -> None:
    """A program may hold on to an old answer; the other addresses are tried for it too."""
    names = Names(nobody)
    first, second = ip_address("203.0.113.1"), ip_address("203.0.113.2")
    names.pin("web.example", first)
    names.pin("twin.example", first)
    names.pin("web.example", second)

    assert names.names_of(first) == ("twin.example", "web.example")
    assert names.siblings(("web.example",), first) == [second]
    assert names.siblings(("none.example",), first) == []


async def test_sandbox_has_few_names_resolved_at_once_and_the_rest_wait() -> None:
    """Threads of the host wait for name servers that never answer: they are everybody's."""
    asked: list[str] = []
    gate = asyncio.Event()

    async def slow(name: str) -> Sequence[str]:
        asked.append(name)
        await gate.wait()
        return ["203.0.113.1"]

    names = Names(slow)
    many = [asyncio.ensure_future(names.lookup(f"n{n}.example")) for n in range(64)]
    await until(lambda: len(asked) >= 4)

    assert len(asked) == 4
    with pytest.raises(TooManyLookupsError):
        await names.lookup("n64.example")
    gate.set()
    assert await asyncio.gather(*many) == [(ip_address("203.0.113.1"),)] * 64
    assert len(asked) == 64
