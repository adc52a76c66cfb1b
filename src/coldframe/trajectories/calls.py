"""The journal of one attempt's calls of its model: exact tokens, as the engine gave them.

One JSON object per line, only ever appended to. A call is written before its answer is handed
over, and a mark after it: `delivered` or `abandoned`. Only delivered calls are turns. Within a
segment every prompt begins with all ids before it, so a call holds only the ids that are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from coldframe.protocol import strict_json
from coldframe.protocol.errors import InferenceError
from coldframe.trajectories.base import Model
from coldframe.trajectories.store import read_regular

SCHEMA: Literal["coldframe.calls/2"] = "coldframe.calls/2"
CALLS_FILE = "calls.jsonl"
MAX_DEPTH = strict_json.MAX_DEPTH - 8
"""Of a request or an answer, in levels: a line that holds a part of it is nested a little deeper,
and one that is too deep to be read back would cost the whole journal."""

TokenId = Annotated[int, Field(strict=True, ge=0)]
LogProb = Annotated[float, Field(strict=True, le=0, allow_inf_nan=False)]


class Level(StrEnum):
    """How much of a call was captured. Below `tokens` nothing is trainable."""

    TOKENS = "tokens"
    LOGPROBS = "logprobs"
    TEXT = "text"

    @property
    def rank(self) -> int:
        """The more is captured, the greater."""
        return {Level.TEXT: 0, Level.LOGPROBS: 1, Level.TOKENS: 2}[self]


class Budget(Model):
    """What an attempt may use of its model. None: as much as it likes."""

    tokens: int | None = Field(default=None, ge=1)
    """That the model produces."""
    calls: int | None = Field(default=None, ge=1)
    wall_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds from the minting of the key on."""


class Retry(Model):
    """A try that gave no usable answer."""

    reason: str
    status: int | None = None
    wait_s: float


class Break(Model):
    """A prompt that does not go on where any segment ended."""

    nearest: int
    """The segment whose ids it shares the longest beginning with."""
    shared: int
    """So many ids."""
    had: int
    """Ids of that segment."""

    @property
    def reason(self) -> str:
        """Why it is none, in words."""
        return (
            f"the prompt has {self.shared} of the {self.had} ids of segment {self.nearest} in "
            "common and then differs"
        )


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Declared(Model):
    """What a conversation is to the others of its attempt, as whoever calls has said."""

    name: str = Field(pattern=_NAME)
    kind: Literal["main", "sub_agent", "compaction"]
    owner: str | None = Field(None, pattern=_NAME)
    """Name of the conversation that began this one; None of the main one."""


class AttemptLine(Model):
    """Who calls. The first line."""

    type: Literal["attempt"] = "attempt"
    schema_version: Literal["coldframe.calls/2"] = SCHEMA
    attempt_id: str
    key_sha256: str
    """Of the key that was minted for it: the attempt's identity, which nobody else can use."""
    model: str
    capture: Level
    budget: Budget = Budget()
    started_at: float


class CallLine(Model):
    """One answer of the engine, checked on arrival."""

    type: Literal["call"] = "call"
    call_id: str
    step: str = ""
    """Of a task of several: which one."""
    segment: int = Field(ge=0)
    extends: int = Field(ge=0)
    """Ids of the prompt that are the segment's so far; `prompt_token_ids` follow them."""
    declared: Declared | None = None
    """What its segment is. None: nobody said."""
    broke: Break | None = None
    """Why it begins a segment, unless it is the first of its step."""
    level: Level
    flaws: tuple[str, ...] = ()
    """What kept it below the level that was asked for."""
    prompt_token_ids: tuple[TokenId, ...] | None = None
    completion_token_ids: tuple[TokenId, ...] | None = None
    logprobs: tuple[LogProb, ...] | None = None
    prompt_tokens: int | None = None
    """As the engine counted them."""
    completion_tokens: int | None = None
    finish_reason: str | None = None
    message: dict[str, Any]
    """The answer, as chat completions have it."""
    dialect: str
    model_asked: str | None = None
    model: str | None = None
    """That answered, by its own account."""
    sampling_asked: dict[str, Any]
    sampling_sent: dict[str, Any]
    policy_version: str | None = None
    policy_changed: bool = False
    """Other weights were announced before the answer had arrived."""
    retries: tuple[Retry, ...] = ()
    started_at: float
    latency_s: float


class MarkLine(Model):
    """What became of a call's answer."""

    type: Literal["delivered", "abandoned"]
    call_id: str


class EventLine(Model):
    """What is no turn: a budget that ended, a call that failed or was given up, a step of the task
    that began (`message` is its name)."""

    type: Literal["event"] = "event"
    kind: Literal["budget", "failed", "gone", "step"]
    message: str
    retries: tuple[Retry, ...] = ()
    at: float


class EndLine(Model):
    """The key is no longer valid. The last line."""

    type: Literal["end"] = "end"
    at: float


Line = AttemptLine | CallLine | MarkLine | EventLine | EndLine
_LINES: dict[str, type[Line]] = {
    "attempt": AttemptLine,
    "call": CallLine,
    "delivered": MarkLine,
    "abandoned": MarkLine,
    "event": EventLine,
    "end": EndLine,
}


def encode(line: Line) -> bytes:
    """Return a line of the journal; floats as their shortest exact decimal."""
    text = json.dumps(line.model_dump(mode="python"), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


@dataclass(frozen=True)
class Turn:
    """A call whose answer was received, with its whole prompt."""

    call: CallLine
    prompt_token_ids: tuple[int, ...]


@dataclass
class CapturedCalls:
    """What an attempt's journal says."""

    attempt: AttemptLine
    turns: list[Turn] = field(default_factory=list)
    """In the order of their answers."""
    unsettled: list[CallLine] = field(default_factory=list)
    """Nobody knows whether their answers were received: the proxy died over it."""
    abandoned: list[CallLine] = field(default_factory=list)
    """Their answers were not received."""
    events: list[EventLine] = field(default_factory=list)
    ended: bool = False

    @property
    def level(self) -> Level:
        """The lowest level of any turn; of none: that which was asked for."""
        levels = [turn.call.level for turn in self.turns]
        return min(levels, key=lambda one: one.rank, default=self.attempt.capture)

    def segments(self, step: str = "") -> dict[int, list[Turn]]:
        """Return the turns of a step by segment, in order of their begin."""
        found: dict[int, list[Turn]] = {}
        for turn in self.turns:
            if turn.call.step == step:
                found.setdefault(turn.call.segment, []).append(turn)
        return dict(sorted(found.items()))


def read_calls(path: Path) -> CapturedCalls:
    """Return a journal's content; a last line that a killed process left half written is not one.

    Raises:
        InferenceError: there is none, or it is no journal.
    """
    lines = list(_lines(path))
    if not lines or not isinstance(lines[0], AttemptLine):
        raise InferenceError(f"{path}: no journal of calls; its first line names no attempt")
    # The last mark counts: what seemed abandoned may be proven to have been received.
    marks = {one.call_id: one.type for one in lines if isinstance(one, MarkLine)}
    captured = CapturedCalls(lines[0])
    ids: dict[int, tuple[int, ...]] = {}
    for line in lines:
        match line:
            case CallLine():
                mark = marks.get(line.call_id)
                if mark is None:
                    captured.unsettled.append(line)
                elif mark == "abandoned":
                    captured.abandoned.append(line)
                else:
                    captured.turns.append(_turn(path, line, ids))
            case EventLine():
                captured.events.append(line)
            case EndLine():
                captured.ended = True
    return captured


def _turn(path: Path, line: CallLine, ids: dict[int, tuple[int, ...]]) -> Turn:
    if line.prompt_token_ids is None:
        return Turn(line, ())
    before = ids.get(line.segment, ())
    if line.extends != len(before):
        raise InferenceError(
            f"{path}: call {line.call_id} extends {line.extends} ids, its segment has {len(before)}"
        )
    prompt = before + line.prompt_token_ids
    ids[line.segment] = prompt + (line.completion_token_ids or ())
    return Turn(line, prompt)


def _lines(path: Path) -> Iterator[Line]:
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise InferenceError(
            f"{path}: no journal of calls; a run keeps them only if it is made with --capture"
        ) from None
    except OSError as error:
        raise InferenceError(f"{path}: no journal of calls: {error.strerror}") from error
    for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            value = strict_json.parse(raw)
            yield _LINES[value["type"]].model_validate(value)
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise InferenceError(f"{path}:{number}: no line of a journal: {error}") from error
