"""A sandbox's egress events: a bounded ring that readers follow by a cursor."""

from __future__ import annotations

import heapq
import time
from collections import deque
from itertools import islice
from typing import Any

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
        self._refused: deque[EgressEvent] = deque(maxlen=kept)
        self._others: deque[EgressEvent] = deque(maxlen=kept)
        self._next = 0

    def add(self, kind: EgressKind, decision: EgressDecision, **fields: Any) -> None:
        """Note a decision."""
        event = EgressEvent.model_construct(
            seq=self._next,
            at=time.time(),
            sandbox_id=self._sandbox_id,
            kind=kind,
            decision=decision,
            **fields,
        )
        self._next += 1
        ring = self._refused if decision is EgressDecision.REFUSED else self._others
        ring.append(event)

    def read(self, cursor: int, limit: int) -> EgressEvents:
        """Return at most `limit` events from a cursor on."""
        start = min(max(cursor, 0), self._next)
        both = heapq.merge(self._refused, self._others, key=_number)
        events = tuple(islice((event for event in both if event.seq >= start), max(limit, 0)))
        end = events[-1].seq + 1 if len(events) == limit and events else self._next
        return EgressEvents.model_construct(
            events=events, next_cursor=end, dropped=end - start - len(events)
        )


def _number(event: EgressEvent) -> int:
    return event.seq
