"""The contract of the store seam, as checks that anybody can run on their own store.

`await run_self_check(open_one)` needs no test framework; `open_one()` returns another store on the
same, at first empty place. It raises CheckFailedError with a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from coldframe.gateway.store.base import KeyRecord, Store
from coldframe.protocol.models import Quota

__all__ = ["CHECKS", "CheckFailedError", "run_self_check"]

OpenStore: TypeAlias = Callable[[], Store]
Check: TypeAlias = Callable[[OpenStore], Awaitable[None]]

_BYTES = bytes(range(256))
_MANY = 50


class CheckFailedError(AssertionError):
    """The store does not do what the seam promises."""


def _equal(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise CheckFailedError(f"{what}: {actual!r:.300} instead of {expected!r:.300}")


def _key(key_id: str, owner: str = "amber", created_at: float = 1.5) -> KeyRecord:
    return KeyRecord(key_id, owner, ("exec", "read"), _BYTES[:32], created_at)


async def key_comes_back_as_it_was_kept(open_one: OpenStore) -> None:
    store = open_one()
    record = KeyRecord("back", "an owner", ("admin",), _BYTES[-32:], 1_790_000_000.123456, 2.25)
    await store.add_key(record)
    _equal(await store.find_key("back"), record, "the key")
    _equal(await open_one().find_key("back"), record, "the key, by another")
    _equal(await store.find_key("back "), None, "a key that is not there")


async def it_waits_only_if_it_says_so(open_one: OpenStore) -> None:
    store = open_one()
    for ask in () if store.waits else (lambda: store.find_key("none"), store.keyless):
        question = ask()
        try:
            question.send(None)
        except StopIteration:
            continue
        question.close()
        raise CheckFailedError("it says that no call waits, and one does")


async def id_is_taken_once(open_one: OpenStore) -> None:
    store, first = open_one(), _key("once")
    await store.add_key(first)
    try:
        await open_one().add_key(_key("once", "green"))
    except ValueError:
        _equal(await store.find_key("once"), first, "the first key")
    else:
        raise CheckFailedError("a second key of the same id was taken")


async def one_of_many_that_take_an_id_at_once_gets_it(open_one: OpenStore) -> None:
    tries = (open_one().add_key(_key("raced", f"o{n}")) for n in range(8))
    ends = await asyncio.gather(*tries, return_exceptions=True)
    _equal([type(end) for end in ends].count(type(None)), 1, "keys that were taken")


async def revoking_holds_at_once_for_everybody(open_one: OpenStore) -> None:
    one, other = open_one(), open_one()
    await one.add_key(_key("gone"))
    _equal((await _there(other, "gone")).revoked_at, None, "a key that is valid")
    _equal(await one.revoke_key("gone", 7.5), True, "revoking a key")
    _equal((await _there(other, "gone")).revoked_at, 7.5, "the same, to another")
    _equal(await other.revoke_key("gone", 9.0), True, "revoking it twice")
    _equal((await _there(one, "gone")).revoked_at, 7.5, "when it was revoked first")
    _equal(await one.revoke_key("never", 1.0), False, "revoking what is not there")
    _equal(await one.find_key("never"), None, "what was never there")


async def _there(store: Store, key_id: str) -> KeyRecord:
    record = await store.find_key(key_id)
    if record is None:
        raise CheckFailedError(f"key {key_id!r} is not there")
    return record


async def keys_are_listed_in_order_of_their_making(open_one: OpenStore) -> None:
    store = open_one()
    before = {record.id for record in await store.keys()}
    for key_id, at in (("z", 30.0), ("a", 31.0), ("m", 29.0)):
        await store.add_key(_key(key_id, created_at=at))
    await store.revoke_key("z", 40.0)
    listed = [record.id for record in await open_one().keys() if record.id not in before]
    _equal(listed, ["m", "z", "a"], "the keys")


async def quota_is_the_owners_alone(open_one: OpenStore) -> None:
    store = open_one()
    _equal(await store.quota("nobody"), Quota(), "a quota that was never set")
    quota = Quota(sandboxes=3, cpu=0.5, memory_bytes=1 << 40, disk_bytes=0)
    await store.set_quota("amber", quota)
    _equal(await open_one().quota("amber"), quota, "the quota, to another")
    _equal(await store.quota("Amber"), Quota(), "another owner's")
    await store.set_quota("amber", Quota(sandboxes=1))
    _equal(await store.quota("amber"), Quota(sandboxes=1), "the quota that replaced it")


async def odd_names_stay_apart(open_one: OpenStore) -> None:
    store = open_one()
    names = ["o:1", "o", "o\n", "o*", "o{x}", "ö", "'; DROP TABLE quotas; --", "o\x00p"]
    for number, name in enumerate(names):
        await store.set_quota(name, Quota(sandboxes=number))
    found = [(await store.quota(name)).sandboxes for name in names]
    _equal(found, list(range(len(names))), "quotas of odd names")


async def nothing_is_lost_that_comes_at_once(open_one: OpenStore) -> None:
    stores = [open_one() for _ in range(4)]
    wanted = {f"many{number}" for number in range(_MANY)}
    adds = (stores[n % 4].add_key(_key(one)) for n, one in enumerate(sorted(wanted)))
    await asyncio.gather(*adds)
    listed = {record.id for record in await stores[0].keys()}
    _equal(wanted - listed, set(), "keys that were lost")


async def closing_twice_is_fine_and_loses_nothing(open_one: OpenStore) -> None:
    store = open_one()
    await store.add_key(_key("stays"))
    await store.close()
    await store.close()
    _equal((await _there(open_one(), "stays")).owner, "amber", "the key of a store that was closed")


CHECKS: tuple[Check, ...] = (
    key_comes_back_as_it_was_kept,
    it_waits_only_if_it_says_so,
    id_is_taken_once,
    one_of_many_that_take_an_id_at_once_gets_it,
    revoking_holds_at_once_for_everybody,
    keys_are_listed_in_order_of_their_making,
    quota_is_the_owners_alone,
    odd_names_stay_apart,
    nothing_is_lost_that_comes_at_once,
    closing_twice_is_fine_and_loses_nothing,
)
"""Every promise of the seam."""


async def run_check(check: Check, make: OpenStore) -> None:
    """Make one check, and close every store that it opened."""
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(make())
        return opened[-1]

    try:
        await check(open_one)
    finally:
        for store in opened:
            await store.close()


async def run_self_check(make: OpenStore) -> None:
    """Make every check, in order.

    Raises:
        CheckFailedError: the first promise that is not kept.
    """
    for check in CHECKS:
        await run_check(check, make)
