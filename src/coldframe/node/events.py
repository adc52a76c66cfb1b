"""What happened to sandboxes, in order: the latest events of one kind, to be read from a cursor.

A cursor is the random id of an event, so that it tells nobody how much others do. It is good as
long as its event is kept; after that the reader is told from where on it can go on.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from coldframe.node.life import Sandbox
from coldframe.protocol import tracing
from coldframe.protocol.errors import CursorExpiredError, InvalidRequestError
from coldframe.protocol.models import (
    EventKind,
    EventPage,
    GuardRefusal,
    SandboxEvent,
    SandboxState,
)
from coldframe.protocol.network import EgressEvent

OLDEST = "oldest"
"""The cursor of whoever wants all that is kept."""
_CURSOR_BYTES = 9
_CURSOR = re.compile(rf"ev-[0-9a-f]{{{2 * _CURSOR_BYTES}}}")


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    cursor: str
    owner: str | None
    at: float
    sandbox_id: str
    state: SandboxState
    version: int
    reason: str | None
    trace_id: str | None
    kind: EventKind
    egress: EgressEvent | None
    tamper: GuardRefusal | None

    def shown(self) -> SandboxEvent:
        return SandboxEvent(
            cursor=self.cursor,
            at=self.at,
            sandbox_id=self.sandbox_id,
            state=self.state,
            version=self.version,
            reason=self.reason,
            trace_id=self.trace_id,
            kind=self.kind,
            egress=self.egress,
            tamper=self.tamper,
        )


class Events:
    """A ring of the latest `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: deque[_Entry] = deque()
        self._numbers: dict[str, int] = {}
        """Of cursors that can be asked with: those kept, and the one before the oldest."""
        self._watchers: set[asyncio.Future[None]] = set()
        self._latest = self._before = _new_cursor()
        self._numbers[self._before] = self._last = 0

    def add(
        self,
        sandbox: Sandbox,
        *,
        egress: EgressEvent | None = None,
        tamper: GuardRefusal | None = None,
    ) -> None:
        """Note what has happened, a transition or what is given, and wake those who wait."""
        self._last += 1
        kind, at = EventKind.STATE, time.time()
        if egress is not None:
            kind, at = EventKind.EGRESS, egress.at
        elif tamper is not None:
            kind, at = EventKind.TAMPER, tamper.at
        entry = _Entry(
            self._last,
            _new_cursor(),
            sandbox.owner,
            at,
            sandbox.id,
            sandbox.state,
            sandbox.version,
            sandbox.reason,
            tracing.current() or sandbox.trace_id,
            kind,
            egress,
            tamper,
        )
        self._kept.append(entry)
        self._latest = entry.cursor
        self._numbers[entry.cursor] = entry.number
        if len(self._kept) > self._limit:
            del self._numbers[self._before]
            self._before = self._kept.popleft().cursor
        watchers, self._watchers = self._watchers, set()
        for turn in watchers:
            if not turn.done():
                turn.set_result(None)

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
            return EventPage(events=(), next_cursor=self._latest)
        page = self._after(cursor, limit, owner)
        while wait and not page.events:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.add(turn)
            try:
                await turn
            finally:
                self._watchers.discard(turn)
            page = self._after(page.next_cursor, limit, owner)
        return page

    def _after(self, cursor: str, limit: int, owner: str | None) -> EventPage:
        number = self._numbers.get(self._before if cursor == OLDEST else cursor)
        if number is None and not _CURSOR.fullmatch(cursor):
            raise InvalidRequestError(
                f"{cursor[:40]!r} is no cursor of events: give the id of one, or oldest"
            )
        if number is None:
            raise CursorExpiredError(
                f"events after {cursor[:40]!r} are kept no longer: look at the sandboxes, and go "
                f"on from {self._before!r}",
                oldest=self._before,
            )
        found: list[SandboxEvent] = []
        skip = number - self._numbers[self._before]
        reached = cursor if cursor != OLDEST else self._before
        for entry in islice(self._kept, skip, None):
            reached = entry.cursor
            if owner is None or entry.owner == owner:
                found.append(entry.shown())
                if len(found) == limit:
                    break
        return EventPage(events=tuple(found), next_cursor=reached)


def _new_cursor() -> str:
    return f"ev-{secrets.token_hex(_CURSOR_BYTES)}"
