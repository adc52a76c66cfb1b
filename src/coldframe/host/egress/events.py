"""A sandbox's egress events: a bounded ring that readers follow by a cursor."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

from coldframe.protocol.network import EgressDecision, EgressEvent, EgressEvents, EgressKind

KEPT = 8192
"""Events that are kept, of refusals and of others each; the oldest go first."""


class EventLog:
    """Belongs to one event loop; outlives the policies that filled it.

    Refusals cost the sandbox nothing, so they have a ring of their own: a flood of them cannot
    push out what was allowed.
    """

    def __init__(self, sandbox_id: str, kept: int = KEPT) -> None:
        self._sandbox_id = sandbox_id
        self._refused: deque[_Noted] = deque(maxlen=kept)
        self._others: deque[_Noted] = deque(maxlen=kept)
        self._next = 0
        self._told: Callable[[EgressEvent], None] | None = None

    def tell(self, told: Callable[[EgressEvent], None]) -> None:
        """Call `told` with each event that is kept, and with each that comes."""
        for event in self.read(0, self._next).events:
            told(event)
        self._told = told

    def add(
        self,
        kind: EgressKind,
        decision: EgressDecision,
        *,
        connection: int | None = None,
        name: str | None = None,
        address: str | None = None,
        port: int | None = None,
        rule: str | None = None,
        reason: str = "",
        bytes_out: int = 0,
        bytes_in: int = 0,
    ) -> None:
        """Note a decision."""
        about = (connection, name, address, port, rule, reason, bytes_out, bytes_in)
        noted = (self._next, time.time(), kind, decision, *about)
        self._next += 1
        ring = self._refused if decision is EgressDecision.REFUSED else self._others
        ring.append(noted)
        if self._told is not None:
            self._told(self._event(noted))

    def read(self, cursor: int, limit: int) -> EgressEvents:
        """Return at most `limit` events from a cursor on."""
        start = min(max(cursor, 0), self._next)
        both = heapq.merge(self._refused, self._others, key=itemgetter(0))
        page = islice((noted for noted in both if noted[0] >= start), max(limit, 0))
        events = tuple(map(self._event, page))
        end = events[-1].seq + 1 if len(events) == limit and events else self._next
        return EgressEvents.model_construct(
            events=events, next_cursor=end, dropped=end - start - len(events)
        )

    def _event(self, noted: _Noted) -> EgressEvent:
        fields = dict(zip(_FIELDS, noted, strict=True))
        return EgressEvent.model_construct(sandbox_id=self._sandbox_id, **fields)


_Noted: TypeAlias = tuple[Any, ...]
"""An event's fields: a quarter of its memory, and a sandbox can fill both rings."""
_FIELDS = (
    "seq",
    "at",
    "kind",
    "decision",
    "connection",
    "name",
    "address",
    "port",
    "rule",
    "reason",
    "bytes_out",
    "bytes_in",
)
