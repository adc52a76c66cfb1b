"""The rules about conversations, and what proves that rows belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coldframe.learning.contracts.evidence import Call, Totals
from coldframe.learning.contracts.rules import Breaches, Rules, not_all
from coldframe.learning.contracts.topologies import TOPOLOGIES, Span
from coldframe.learning.contracts.values import is_number

if TYPE_CHECKING:
    from coldframe.learning.contracts.rollouts import AnyRollout

rule: Rules[AnyRollout] = Rules()


@rule
def spans_are_well_formed(rollout: AnyRollout) -> Breaches:
    """Spans are named, and say from which turn to which, and what proves them."""
    yield from not_all(rollout.spans, Span, "spans")
    for index, span in enumerate(rollout.spans):
        yield from not_all(span.calls, Call, f"spans[{index}].calls")
        if span.totals is not None and not isinstance(span.totals, Totals):
            yield f"spans[{index}].totals", span.totals, "is no Totals"
        if span.reward is not None and not is_number(span.reward):
            yield f"spans[{index}].reward", span.reward, "is no finite number"
        for field in ("name", "kind"):
            value = getattr(span, field)
            if not isinstance(value, str) or not value:
                yield f"spans[{index}].{field}", value, "has no name"
        for field in ("first_turn", "end_turn"):
            if type(getattr(span, field)) is not int:
                yield f"spans[{index}].{field}", getattr(span, field), "is no integer"


@rule
def calls_are_named(rollout: AnyRollout) -> Breaches:
    """A call has an id, by which it is known again."""
    for field, _, call in _calls(rollout):
        if not isinstance(call.call_id, str) or not call.call_id:
            yield f"{field}.call_id", call.call_id, "has no id"


@rule
def topology_is_declared(rollout: AnyRollout) -> Breaches:
    """The rows were put together in a way that has a name and a version."""
    if rollout.topology not in list(TOPOLOGIES):
        yield "topology", rollout.topology, f"is none of {', '.join(TOPOLOGIES)}"


@rule
def linear_is_one_span(rollout: AnyRollout) -> Breaches:
    """What calls itself linear is one conversation."""
    if rollout.topology == "linear@1" and len(rollout.spans) > 1:
        yield "spans", [span.name for span in rollout.spans], "linear is one span"


@rule
def spans_cover_every_turn_once(rollout: AnyRollout) -> Breaches:
    """No turn is left out or belongs to two conversations."""
    due = 0
    for index, span in enumerate(rollout.spans):
        if span.first_turn != due or span.end_turn <= span.first_turn:
            found = (span.first_turn, span.end_turn)
            yield f"spans[{index}]", found, f"does not go on at turn {due}"
        due = span.end_turn
    if due != len(rollout.prompt_token_ids):
        yield "spans", due, f"do not cover all {len(rollout.prompt_token_ids)} turns"


@rule
def turns_are_proven(rollout: AnyRollout) -> Breaches:
    """A prompt and a completion in one place are shown to be of one turn.

    Equal counts do not show it: one turn may lack its prompt and another its completion.
    """
    for index, span in enumerate(rollout.spans):
        if not span.calls and span.totals is None:
            yield (
                f"spans[{index}].calls",
                span.calls,
                "nothing proves that rows belong to the same turn: neither the calls nor the "
                "totals of tokens are known",
            )


@rule
def calls_are_as_many_as_turns(rollout: AnyRollout) -> Breaches:
    """Every call has its rows, every row its call."""
    for index, span in enumerate(rollout.spans):
        turns = span.end_turn - span.first_turn
        if span.calls and len(span.calls) != turns:
            field, found = f"spans[{index}].calls", len(span.calls)
            yield field, found, f"lengths differ: calls, and rows of {turns} turns"


@rule
def calls_count_the_tokens_of_their_rows(rollout: AnyRollout) -> Breaches:
    """The engine counted as many tokens as the rows hold, call by call."""
    for field, turn, call in _calls(rollout):
        columns = rollout.prompt_token_ids, rollout.completion_token_ids
        found = tuple(len(column[turn]) for column in columns if turn < len(column))
        counted = (call.prompt_tokens, call.completion_tokens)
        if found != counted:
            yield field, counted, f"lengths differ: tokens counted, and in the rows {found}"


@rule
def calls_are_recorded_once(rollout: AnyRollout) -> Breaches:
    """No call stands there twice, so that nothing is trained twice."""
    seen: dict[str, str] = {}
    for field, _, call in _calls(rollout):
        if call.call_id in seen:
            yield f"{field}.call_id", call.call_id, f"the same call as {seen[call.call_id]}"
        seen[call.call_id] = field


@rule
def totals_are_the_sums_of_the_rows(rollout: AnyRollout) -> Breaches:
    """With totals as the only proof, not one token is missing in either column."""
    for index, span in enumerate(rollout.spans):
        if span.totals is None:
            continue
        turns = slice(span.first_turn, span.end_turn)
        found = (
            sum(len(row) for row in rollout.prompt_token_ids[turns]),
            sum(len(row) for row in rollout.completion_token_ids[turns]),
        )
        counted = (span.totals.prompt_tokens, span.totals.completion_tokens)
        if found != counted:
            problem = f"lengths differ: tokens counted, and in the rows {found}"
            yield f"spans[{index}].totals", counted, problem


@rule
def turns_extend_what_came_before(rollout: AnyRollout) -> Breaches:
    """Within a conversation a prompt begins with the prompt and completion before it, id by id.

    If not, the history was rewritten or rows changed places.
    """
    for span in rollout.spans:
        for turn in range(span.first_turn + 1, span.end_turn):
            prompts, completions = rollout.prompt_token_ids, rollout.completion_token_ids
            before = [*prompts[turn - 1], *completions[turn - 1]]
            prompt = list(prompts[turn])
            if prompt[: len(before)] != before:
                both = zip(before, prompt, strict=False)
                at = next(
                    (place for place, (old, new) in enumerate(both) if old != new), len(prompt)
                )
                yield (
                    f"prompt_token_ids[{turn}][{at}]",
                    prompt[at : at + 1],
                    f"does not extend turn {turn - 1} by exact ids (reordered rows, or a history "
                    "that was rewritten, which begins a segment of its own)",
                )


@rule
def turns_are_not_repeated(rollout: AnyRollout) -> Breaches:
    """No two turns are the same to the last id: context that was copied is not trained twice."""
    seen: dict[tuple[object, object], int] = {}
    pairs = zip(rollout.prompt_token_ids, rollout.completion_token_ids, strict=False)
    for turn, (prompt, completion) in enumerate(pairs):
        key = tuple(prompt), tuple(completion)
        if key in seen:
            yield f"prompt_token_ids[{turn}]", prompt, f"turn {turn} repeats turn {seen[key]}"
        seen[key] = turn


def _calls(rollout: AnyRollout) -> Iterator[tuple[str, int, Call]]:
    for index, span in enumerate(rollout.spans):
        for place, call in enumerate(span.calls):
            yield f"spans[{index}].calls[{place}]", span.first_turn + place, call
