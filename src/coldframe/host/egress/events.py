"""A sandbox's egress events: a bounded ring that readers follow by a cursor."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Any

from coldframe.protocol.network import EgressDecision, EgressEvent, EgressEvents, EgressKind

KEPT = 8192
"""Events that are kept; the oldest go first."""


class EventLog:
    """Belongs to one event loop; outlives the policies that filled it."""

    def __init__(self, sandbox_id: str, kept: int = KEPT) -> None:
        self._sandbox_id = sandbox_id
        self._ring: deque[EgressEvent] = deque(maxlen=kept)
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
        self._ring.append(event)

    def read(self, cursor: int, limit: int) -> EgressEvents:
        """Return at most `limit` events from a cursor on."""
        first = self._next - len(self._ring)
        start = min(max(cursor, first), self._next)
        events = tuple(islice(self._ring, start - first, start - first + limit))
        return EgressEvents.model_construct(
            events=events, next_cursor=start + len(events), dropped=max(0, start - max(cursor, 0))
        )
