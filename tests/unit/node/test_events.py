"""Pages of events: from any cursor, and no more of them in memory than the page."""

from __future__ import annotations

import tracemalloc

import pytest

from coldframe.node.events import Events
from coldframe.node.life import Sandbox
from coldframe.protocol.models import SandboxSpec

OWNERS = ("amber", "blue", "amber", "birch")


def _sandbox(owner: str) -> Sandbox:
    spec = SandboxSpec(image="any", labels={"owner": owner})
    return Sandbox(id="sb-0", node_id="node", runtime="fake", spec=spec)


def _filled(limit: int, count: int) -> Events:
    events, sandboxes = Events(limit), {owner: _sandbox(owner) for owner in OWNERS}
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
