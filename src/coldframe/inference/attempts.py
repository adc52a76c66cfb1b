"""Attempts by their keys, and where each call of theirs belongs.

A prompt goes on where a segment ended if it begins with all of its ids, one by one. If it goes
on nowhere, the break is recorded and a segment begins; what it is (a sub-agent, a compaction, a
template that rewrites history) nobody can tell from here, unless whoever calls declares it. What
is declared goes on in segments of the same declaration alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldframe.inference.journal import Journal, check_name, digest_of
from coldframe.trajectories.calls import (
    AttemptLine,
    Break,
    Budget,
    CallLine,
    CapturedCalls,
    Declared,
    EndLine,
    EventLine,
    Level,
    MarkLine,
    Retry,
    read_calls,
)
from coldframe.trajectories.lines import cut_torn_line

MAX_JOURNAL_BYTES = 256 << 20
MAX_KNOWN_ARGUMENTS = 4096
MAX_OPEN_SEGMENTS = 32
"""Of one attempt. Beyond them, what was gone on with the longest ago is closed: a prompt that would
go on there begins another segment."""


def pack(ids: Iterable[int]) -> bytes:
    """Return ids as four bytes each: compared in one sweep, and a tenth of a list's memory."""
    return array("I", ids).tobytes()


@dataclass
class Segment:
    """A conversation that may be gone on with; its ids are packed."""

    index: int
    step: str
    declared: Declared | None = None
    ids: bytes = b""
    pending: dict[str, bytes] = field(default_factory=dict)
    """By call, the ids as they are if its answer is received."""
    unknown: set[str] = field(default_factory=set)
    """Those of `pending` that nobody hands over any more: the client seems to have left, or the
    process died over it. If a prompt goes on from one, it was received after all."""


@dataclass(frozen=True)
class Place:
    """Where a prompt belongs."""

    segment: Segment
    extends: int
    broke: Break | None = None


class Attempt:
    """One attempt while its key is valid."""

    def __init__(self, line: AttemptLine, journal: Journal) -> None:
        self.line, self.journal = line, journal
        self.open: dict[int, Segment] = {}
        """Segments by index, that which was gone on with last at the end."""
        self.segments = 0
        """How many were begun."""
        self.step = ""
        self.tokens = 0
        self.calls = 0
        """That the engine has answered, received or not, and those that it is asked now."""
        self.promised = 0
        """Tokens that calls in flight may produce at most, where there is a budget of them."""
        self._settled = asyncio.Event()
        self.breaks = 0
        self.flawed: list[str] = []
        """Calls that gave less than was asked for, each with what was wrong."""
        self.arguments: dict[str, str] = {}
        """Of tool calls by id, as the model wrote them: a dialect may show them parsed."""

    @classmethod
    def adopt(cls, path: Path) -> Attempt | None:
        """Go on with an attempt whose proxy died; None if it had ended, or had not begun.

        Raises:
            InferenceError: its journal is damaged.
        """
        if not cut_torn_line(path):
            path.unlink()  # nobody was given its key
            return None
        captured = read_calls(path)
        if captured.ended:
            return None
        attempt = cls(captured.attempt, Journal(path, fresh=False))
        attempt._restore(captured)
        return attempt

    def _restore(self, captured: CapturedCalls) -> None:
        received = [turn.call for turn in captured.turns]
        for call in (*received, *captured.unsettled, *captured.abandoned):
            self.calls += 1
            self.tokens += call.completion_tokens or 0
            self._note(call)
        for event in captured.events:
            self.step = event.message if event.kind == "step" else self.step
        for turn in captured.turns:
            call = turn.call
            if call.prompt_token_ids is not None:
                segment = self._segment(call.segment, call.step, call.declared)
                segment.ids = pack((*turn.prompt_token_ids, *(call.completion_token_ids or ())))
        for call in captured.unsettled:
            if call.prompt_token_ids is not None:
                segment = self._segment(call.segment, call.step, call.declared)
                segment.pending[call.call_id] = _whole(segment, call)
                segment.unknown.add(call.call_id)

    def _segment(self, index: int, step: str, declared: Declared | None) -> Segment:
        """Return a segment, the last to be closed from now on."""
        segment = self.open.pop(index, None) or Segment(index, step, declared)
        self.open[index] = segment
        self.segments = max(self.segments, index + 1)
        idle = [one for one, other in self.open.items() if not _delivering(other)]
        for one in idle[: max(0, len(self.open) - MAX_OPEN_SEGMENTS)]:
            del self.open[one]
        return segment

    def begin_step(self, name: str) -> None:
        """Let what comes be of another step of the task."""
        self.step = name
        self.event("step", name)

    def exhausted(self) -> str | None:
        """Return which budget is used up, as words for the model."""
        budget = self.line.budget
        if budget.calls is not None and self.calls >= budget.calls:
            return f"{self.calls} of {budget.calls} calls"
        if budget.tokens is not None and self.tokens >= budget.tokens:
            return f"{self.tokens} of {budget.tokens} tokens"
        if budget.wall_s is not None and self.remaining_s() <= 0:
            return f"{budget.wall_s:g} s"
        if self.journal.bytes >= MAX_JOURNAL_BYTES:
            return f"{MAX_JOURNAL_BYTES} bytes of records"
        return None

    async def room(self) -> None:
        """Return once it is known whether tokens are left that calls in flight do not use up."""
        if not self._promised_away():
            return
        wall = self.remaining_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wall == float("inf") else max(wall, 0)):
                while self._promised_away():
                    await self._settled.wait()

    def _promised_away(self) -> bool:
        limit = self.line.budget.tokens
        return limit is not None and self.tokens < limit <= self.tokens + self.promised

    def left(self) -> int | None:
        """Return how many tokens are neither produced nor promised; None: any number."""
        limit = self.line.budget.tokens
        return None if limit is None else limit - self.tokens - self.promised

    @contextlib.contextmanager
    def charged(self, promised: int) -> Iterator[None]:
        """Count a call from its begin on; one that the engine does not answer costs nothing.

        Args:
            promised: tokens that it may produce.
        """
        self.calls += 1
        self.promised += promised
        try:
            yield
        except BaseException:
            self.calls -= 1
            raise
        finally:
            self.promised -= promised
            self._settled.set()  # for those who wait now
            self._settled.clear()

    def remaining_s(self) -> float:
        """Return the seconds that are left of the wall budget."""
        wall = self.line.budget.wall_s
        return float("inf") if wall is None else self.line.started_at + wall - time.time()

    def place(self, prompt: list[int], declared: Declared | None = None) -> Place:
        """Return where a prompt goes on, and settle what it proves about answers before it."""
        packed = pack(prompt)
        here = [one for one in self.open.values() if one.step == self.step]
        mine = [one for one in here if one.declared == declared]
        ends = [
            (len(ids), segment, call_id)
            for segment in mine
            for call_id, ids in (*segment.pending.items(), (None, segment.ids))
            if packed.startswith(ids) and (call_id is not None or not _delivering(segment))
        ]
        if not ends:
            ends = [(0, self._segment(self.segments, self.step, declared), None)]
        length, segment, call_id = max(ends, key=lambda one: one[0])
        if call_id is not None:
            self.settle(segment, call_id, delivered=True)
        for unknown in [*segment.unknown]:
            self.settle(segment, unknown, delivered=False)
        if not length:
            breaks = [_shared(one, packed) for one in here if one.ids]
            return Place(segment, 0, max(breaks, key=lambda one: one.shared, default=None))
        self._segment(segment.index, segment.step, declared)
        return Place(segment, length // 4)

    def record(self, call: CallLine, place: Place | None) -> None:
        """Write a call, before its answer is handed over."""
        self.journal.write(call)
        self._note(call)
        if place is not None:
            place.segment.pending[call.call_id] = _whole(place.segment, call)

    def handed_over(self, call: CallLine, place: Place | None, *, delivered: bool) -> None:
        """Note whether the answer of a call was received."""
        if place is None or not delivered:
            self._mark(call.call_id, delivered)
            if place is not None:
                place.segment.unknown.add(call.call_id)
        elif call.call_id in place.segment.pending:  # else the next prompt has proven it already
            self.settle(place.segment, call.call_id, delivered=True)

    def settle(self, segment: Segment, call_id: str, *, delivered: bool) -> None:
        """Note what is known of an answer now; received, its segment goes on behind it."""
        ids = segment.pending.pop(call_id)
        segment.unknown.discard(call_id)
        if delivered:
            segment.ids = ids
        self._mark(call_id, delivered)

    def _mark(self, call_id: str, delivered: bool) -> None:
        self.journal.write(
            MarkLine(type="delivered" if delivered else "abandoned", call_id=call_id)
        )

    def event(self, kind: Any, message: str, retries: tuple[Retry, ...] = ()) -> None:
        """Write what is no turn."""
        self.journal.write(EventLine(kind=kind, message=message, retries=retries, at=time.time()))

    def _note(self, call: CallLine) -> None:
        """Keep what later calls and `doubts` need of a call."""
        self.breaks += call.broke is not None and call.declared is None
        if call.flaws:
            self.flawed.append(f"{call.call_id}: {'; '.join(call.flaws)}")
        for one in call.message.get("tool_calls") or ():
            with contextlib.suppress(KeyError, TypeError):
                self.arguments[one["id"]] = one["function"]["arguments"]
        while len(self.arguments) > MAX_KNOWN_ARGUMENTS:
            del self.arguments[next(iter(self.arguments))]

    def doubts(self) -> list[str]:
        """Return, for people, why this attempt may not be trained on as one conversation."""
        found = []
        if self.line.capture is not Level.TOKENS:
            found.append(f"captured as {self.line.capture.value}: cannot be trained on")
        if self.flawed:
            count = len(self.flawed)
            found.append(
                f"{count} calls without their tokens: cannot be trained on; {self.flawed[0]}"
            )
        if self.breaks:
            found.append(f"{self.breaks} breaks: prompts that did not go on where an answer ended")
        return found

    def end(self) -> None:
        """Write the last line."""
        self.journal.write(EndLine(at=time.time()))
        self.journal.close()


def _delivering(segment: Segment) -> bool:
    return bool(segment.pending.keys() - segment.unknown)


def _whole(segment: Segment, call: CallLine) -> bytes:
    """Return a segment's ids as they are once a call's answer is received."""
    new = pack((*(call.prompt_token_ids or ()), *(call.completion_token_ids or ())))
    return segment.ids[: 4 * call.extends] + new


def _shared(segment: Segment, prompt: bytes) -> Break:
    mine, other = memoryview(segment.ids), memoryview(prompt)
    low, high = 0, min(len(mine), len(other)) // 4
    while low < high:  # the longest beginning that both have
        middle = (low + high + 1) // 2
        if mine[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return Break(nearest=segment.index, shared=low, had=len(mine) // 4)


def new_attempt(
    path: Path, attempt_id: str, key: str, *, model: str, capture: Level, budget: Budget
) -> Attempt:
    """Begin an attempt's journal.

    Raises:
        InvalidRequestError: it has one, or its id is no name of a file.
    """
    check_name(attempt_id)
    line = AttemptLine(
        attempt_id=attempt_id,
        key_sha256=digest_of(key),
        model=model,
        capture=capture,
        budget=budget,
        started_at=time.time(),
    )
    attempt = Attempt(line, Journal(path, fresh=True))
    attempt.journal.write(line)
    return attempt
