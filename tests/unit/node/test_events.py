"""Which events are kept, for whom, and the pages in which they are read."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from coldframe.node.events import Events
from coldframe.node.life import Sandbox
from coldframe.protocol.errors import CursorExpiredError
from coldframe.protocol.models import SandboxSpec

OWNERS = ("amber", "blue", "amber", "birch")


def _sandbox(name: str, owner: str) -> Sandbox:
    spec = SandboxSpec(image="any", labels={"owner": owner})
    return Sandbox(id=name, node_id="node", runtime="fake", spec=spec)


def _filled(limit: int, count: int) -> Events:
    events, sandboxes = Events(limit), {owner: _sandbox("sb-0", owner) for owner in OWNERS}
    for number in range(count):
        events.add(sandboxes[OWNERS[number % len(OWNERS)]])
    return events


@pytest.mark.parametrize("owner", [None, "amber", "birch", "nobody"])
async def test_page_from_any_cursor_is_what_follows_it(owner: str | None) -> None:
    """Whichever end it is looked for from."""
    events = _filled(200, 300)
    whole = (await events.read("oldest", 1000, owner=owner, wait=False)).events
    cursors = [event.cursor for event in whole]
    for limit in (1, 7, 1000):
        for place, cursor in enumerate(cursors, 1):
            page = await events.read(cursor, limit, owner=owner, wait=False)
            assert page.events == whole[place : place + limit]
            assert page.next_cursor == (page.events or whole)[-1].cursor
    assert len(set(cursors)) == len(cursors)
    assert bool(cursors) is (owner != "nobody")


@pytest.mark.parametrize("owner", [None, "amber"])
async def test_page_from_an_old_cursor_holds_the_page_alone(owner: str | None) -> None:
    """A follower that is far behind asks for thousands of pages."""
    events = _filled(16_384, 20_000)
    cursor, pages = "oldest", 0
    while True:
        tracemalloc.start()
        page = await events.read(cursor, 10, owner=owner, wait=False)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 16_000
        if not page.events:
            break
        pages += 1
        cursor = (await events.read(cursor, 2_000, owner=owner, wait=False)).next_cursor
    assert pages >= 4


async def _read(events: Events, owner: str | None, cursor: str, limit: int = 100) -> list[str]:
    """The sandboxes that the events after a cursor are of."""
    page = await events.read(cursor, limit, owner=owner, wait=False)
    return [event.sandbox_id for event in page.events]


async def test_owner_sees_no_events_of_others() -> None:
    """Not even how many there are: cursors are random."""
    events = Events(4)
    begin = (await events.read(None, 10, owner="amber", wait=False)).next_cursor
    for number, owner in enumerate(["blue", "amber", "blue"]):
        events.add(_sandbox(f"sb-{number}", owner))
    page = await events.read(begin, 10, owner="amber", wait=False)
    assert [event.sandbox_id for event in page.events] == ["sb-1"]
    waiting = asyncio.ensure_future(events.read(page.next_cursor, 10, owner="amber", wait=True))
    await asyncio.sleep(0)
    events.add(_sandbox("sb-3", "blue"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    for _ in range(9):  # what waits follows, however much others do
        events.add(_sandbox("sb-4", "blue"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    events.add(_sandbox("sb-5", "amber"))
    assert [event.sandbox_id for event in (await waiting).events] == ["sb-5"]
    # For all, from where on nothing is missing: blue's last two, amber's last.
    assert await _read(events, None, "oldest") == ["sb-4", "sb-4", "sb-5"]


async def test_events_of_one_owner_push_out_nobody_elses() -> None:
    """Whoever watches a few sandboxes must not miss what became of them because others do much."""
    events = Events(100)
    begin = (await events.read(None, 10, owner="amber", wait=False)).next_cursor
    of_all = (await events.read(None, 10, owner=None, wait=False)).next_cursor
    events.add(_sandbox("amber-0", "amber"))
    for number in range(1000):
        events.add(_sandbox(f"blue-{number}", "blue"))
    events.add(_sandbox("amber-1", "amber"))

    assert (
        await _read(events, "amber", begin)
        == await _read(events, "amber", "oldest")
        == ["amber-0", "amber-1"]
    )
    assert await _read(events, "blue", "oldest", 2) == ["blue-902", "blue-903"]
    assert await _read(events, None, "oldest", 2) == ["blue-902", "blue-903"]
    for owner, lost in (("blue", begin), (None, of_all)):
        with pytest.raises(CursorExpiredError) as refused:
            await _read(events, owner, lost)
        assert len(await _read(events, owner, refused.value.oldest)) == 98 + (owner is None)


async def test_owner_of_whom_nothing_is_kept_is_told_that_something_was() -> None:
    """An empty answer would say that nothing had happened."""
    events = Events(2)
    begin = (await events.read(None, 10, owner="amber", wait=False)).next_cursor
    for owner in ("amber", "blue", "green"):
        events.add(_sandbox(f"{owner}-0", owner))

    assert await _read(events, "blue", "oldest") == ["blue-0"]
    with pytest.raises(CursorExpiredError) as refused:
        await _read(events, "amber", begin)
    assert await _read(events, "amber", refused.value.oldest) == []


async def test_cursor_before_any_gap_is_refused_to_whom_sees_all() -> None:
    """What is dropped later may be older than what was dropped first."""
    events = Events(4)
    events.add(_sandbox("amber-0", "amber"))
    first = (await events.read(None, 10, owner=None, wait=False)).next_cursor
    for number in range(4):
        events.add(_sandbox(f"blue-{number}", "blue"))
    for number in (1, 2):
        events.add(_sandbox(f"amber-{number}", "amber"))

    assert await _read(events, "amber", "oldest") == ["amber-1", "amber-2"]
    with pytest.raises(CursorExpiredError):
        await _read(events, None, first)  # blue-0 and blue-1 would be missing
    assert await _read(events, None, "oldest") == ["blue-2", "blue-3", "amber-1", "amber-2"]


async def test_wait_for_events_that_is_given_up_leaves_nothing() -> None:
    """A node hears of ever more owners, and some never have an event."""
    events = Events(10)
    cursor = (await events.read(None, 1, owner="one", wait=False)).next_cursor
    waiting = [
        asyncio.ensure_future(events.read(cursor, 1, owner="one", wait=True)) for _ in range(2)
    ]
    await asyncio.sleep(0)
    assert len(events._watchers["one"]) == 2

    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)

    assert events._watchers == {}
