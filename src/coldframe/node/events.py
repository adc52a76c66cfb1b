"""What happened to sandboxes, in order: the latest events of one kind, to be read from a cursor.

A cursor is the random id of an event, so that it tells nobody how much others do. It is good as
long as all that came after it is kept; after that the reader is told from where on it can go on.
Where there are too many events, the owner that has most of them loses its oldest, as in `pool`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Reversible
from dataclasses import dataclass, field
from itertools import dropwhile, islice, takewhile

from coldframe.node.life import Sandbox
from coldframe.protocol import tracing
from coldframe.protocol.errors import CursorExpiredError, InvalidRequestError
from coldframe.protocol.models import (
    EventKind,
    EventPage,
    GuardRefusal,
    SandboxEvent,
    SandboxState,
    StorageEvent,
)
from coldframe.protocol.network import EgressEvent

OLDEST = "oldest"
"""The cursor of whoever wants all that is kept."""
_CURSOR_BYTES = 9
_CURSOR = re.compile(rf"ev-[0-9a-f]{{{2 * _CURSOR_BYTES}}}")
_KINDS = {
    EgressEvent: EventKind.EGRESS,
    GuardRefusal: EventKind.TAMPER,
    StorageEvent: EventKind.STORAGE,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """An event, smaller than its model: thousands are kept, and few are read."""

    number: int
    cursor: str
    at: float
    sandbox_id: str
    state: SandboxState
    version: int
    reason: str | None
    trace_id: str | None
    what: EgressEvent | GuardRefusal | StorageEvent | None

    def event(self) -> SandboxEvent:
        what = self.what
        return SandboxEvent.whole(
            cursor=self.cursor,
            at=self.at,
            sandbox_id=self.sandbox_id,
            kind=EventKind.STATE if what is None else _KINDS[type(what)],
            state=self.state,
            version=self.version,
            reason=self.reason,
            egress=what if isinstance(what, EgressEvent) else None,
            tamper=what if isinstance(what, GuardRefusal) else None,
            storage=what if isinstance(what, StorageEvent) else None,
            trace_id=self.trace_id,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """After an event, whether it is kept or not."""

    number: int
    cursor: str


@dataclass(slots=True)
class _Share:
    before: _Place
    """The last that is not kept."""
    kept: deque[_Entry] = field(default_factory=deque)


class Events:
    """The latest `limit`, fairly by owner."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[str, _Entry] = {}
        """By cursor, oldest first."""
        self._shares: dict[str | None, _Share] = {}
        self._latest = self._gap = self._before = _Place(0, _new_cursor())
        """Of all: the last, the last that is not kept, and that of owners who have no share."""
        self._watchers: dict[str | None, set[asyncio.Future[None]]] = {}
        """By whose they wait for; None: of all."""

    def add(
        self,
        sandbox: Sandbox,
        what: EgressEvent | GuardRefusal | StorageEvent | None = None,
    ) -> None:
        """Note what has happened, a transition or what is given, and wake those who wait."""
        self._latest = _Place(self._latest.number + 1, _new_cursor())
        entry = _Entry(
            number=self._latest.number,
            cursor=self._latest.cursor,
            at=time.time() if what is None else what.at,
            sandbox_id=sandbox.id,
            state=sandbox.state,
            version=sandbox.version,
            reason=sandbox.reason,
            trace_id=tracing.current() or sandbox.trace_id,
            what=what,
        )
        self._keep(sandbox.owner, entry)
        for whose in {None, sandbox.owner}:
            for turn in self._watchers.pop(whose, ()):
                if not turn.done():
                    turn.set_result(None)

    def _keep(self, owner: str | None, entry: _Entry) -> None:
        share = self._shares.setdefault(owner, _Share(self._before))
        share.kept.append(entry)
        self._kept[entry.cursor] = entry
        if len(self._kept) > self._limit:
            self._drop(*max(self._shares.items(), key=lambda item: len(item[1].kept)))

    def _drop(self, owner: str | None, share: _Share) -> None:
        """Keep the oldest of an owner no longer."""
        oldest = share.kept.popleft()
        del self._kept[oldest.cursor]
        share.before = _Place(oldest.number, oldest.cursor)
        self._gap = max(self._gap, share.before, key=lambda place: place.number)
        if not share.kept:
            del self._shares[owner]
            self._before = self._gap

    async def read(
        self, cursor: str | None, limit: int, *, owner: str | None, wait: bool
    ) -> EventPage:
        """Return what came after a cursor: of one owner's sandboxes, or of all with None.

        Without a cursor, where to begin: nothing, and the cursor of this moment. With `wait`, once
        there is something.

        Raises:
            CursorExpiredError: what followed it is kept no longer in whole; with the oldest.
            InvalidRequestError: it is no cursor.
        """
        if cursor is None:
            return EventPage(events=(), next_cursor=self._now(owner))
        page = self._after(cursor, limit, owner)
        while wait and not page.events:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            watchers = self._watchers.setdefault(owner, set())
            watchers.add(turn)
            try:
                await turn
            finally:
                watchers.discard(turn)
                if not watchers and self._watchers.get(owner) is watchers:
                    del self._watchers[owner]
            page = self._after(page.next_cursor, limit, owner)
        return page

    def _now(self, owner: str | None) -> str:
        if owner is None:
            return self._latest.cursor
        share = self._shares.get(owner)
        return self._before.cursor if share is None else share.kept[-1].cursor

    def _after(self, cursor: str, limit: int, owner: str | None) -> EventPage:
        entries: Reversible[_Entry] = ()
        if owner is None:
            begin, entries = self._gap, self._kept.values()
        elif owner in self._shares:
            begin, entries = self._shares[owner].before, self._shares[owner].kept
        else:
            begin = self._before
        if cursor in (OLDEST, begin.cursor):
            cursor, number = begin.cursor, begin.number
        elif cursor in self._kept:
            number = self._kept[cursor].number
        elif _CURSOR.fullmatch(cursor):
            number = -1
        else:
            raise InvalidRequestError(
                f"{cursor[:40]!r} is no cursor of events: give the id of one, or oldest"
            )
        if number < begin.number:
            raise CursorExpiredError(
                f"events after {cursor[:40]!r} are kept no longer: look at the sandboxes, and go "
                f"on from {begin.cursor!r}",
                oldest=begin.cursor,
            )
        late = 2 * number > begin.number + self._latest.number
        page = (_last_of if late else _first_of)(entries, number, limit)
        found = tuple(entry.event() for entry in page)
        return EventPage(events=found, next_cursor=found[-1].cursor if found else cursor)


def _last_of(entries: Reversible[_Entry], number: int, limit: int) -> Iterable[_Entry]:
    """Return the first `limit` after a number, come to from the newest: most readers are there."""
    after = takewhile(lambda one: one.number > number, reversed(entries))
    return reversed(deque(after, maxlen=limit))


def _first_of(entries: Iterable[_Entry], number: int, limit: int) -> Iterable[_Entry]:
    """Return the same, come to from the oldest."""
    return islice(dropwhile(lambda one: one.number <= number, entries), limit)


def _new_cursor() -> str:
    return f"ev-{secrets.token_hex(_CURSOR_BYTES)}"
