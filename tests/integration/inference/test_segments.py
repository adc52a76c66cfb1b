"""Sub-agents and compactions through the proxy: what they are is declared, and nothing is trained
twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coldframe.inference.proxy import Proxy, ProxySettings
from coldframe.learning.captured import Declare, policy_of, trial_of
from coldframe.learning.contracts import (
    MASKS,
    SEGMENTS,
    ContractError,
    PolicyRollout,
    Topology,
    training_sequences,
)
from coldframe.trajectories.calls import Declared, Turn
from coldframe.trajectories.store import BlobStore
from tests.integration.inference.conftest import Bench, MakeBench
from tests.unit.trajectories.samples import trajectory

MAIN = "name=main; kind=main"
HELPER = "name=helper; kind=sub_agent; owner=main"
SHORTER = "name=shorter; kind=compaction; owner=main"
PATHS = ("/v1/chat/completions", "/v1/messages")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def say(
    bench: Bench, key: str, messages: list[Any], declared: str | None, path: str = PATHS[0]
) -> list[Any]:
    """Have the model say something in a conversation; return that, gone on."""
    headers = {} if declared is None else {"X-Coldframe-Segment": declared}
    async with bench.client(key) as client:
        body = {"messages": messages, "temperature": 1.0, "max_tokens": 100}
        answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if path.endswith("messages"):
        return [*messages, {"role": "assistant", "content": told["content"]}]
    return [*messages, told["choices"][0]["message"]]


async def three_conversations(bench: Bench, *declared: str | None) -> None:
    """Run a main conversation, a sub-agent in its midst, and what it goes on as from a summary."""
    key = bench.mint()
    main = await say(bench, key, [user("do it")], declared[0])
    tool = {"role": "tool", "tool_call_id": "x", "content": "hello"}
    main = await say(bench, key, [*main, tool], declared[0])
    helper = await say(bench, key, [user("help with hello")], declared[1])
    helper = await say(bench, key, [*helper, tool], declared[1])
    main = await say(bench, key, [*main, user("go on")], declared[0])
    text = f"summary: {main[-1]['content']}"
    await say(bench, key, [user(text)], declared[2])


def rollout(
    bench: Bench,
    directory: Path,
    topology: Topology | str = SEGMENTS,
    declare: Declare | None = None,
) -> PolicyRollout:
    one, calls = trajectory(BlobStore(directory / "blobs")), bench.calls()
    policy = policy_of(one, calls, tokenizer="t@1", renderer="r@1")
    calls.ended = True
    trial = trial_of(one, calls, split="train", policy=policy, declare=declare)
    return PolicyRollout.from_trial(trial, topology=topology)


async def test_declared_conversations_become_one_rollout_of_the_engines_own_tokens(
    bench: Bench, tmp_path: Path
) -> None:
    """With owner and order; every token that the policy wrote is trained once."""
    await three_conversations(bench, MAIN, HELPER, SHORTER)

    made = rollout(bench, tmp_path)

    assert [(one.name, one.kind, one.owner) for one in made.spans] == [
        ("main", "main", None),
        ("helper", "sub_agent", "main"),
        ("shorter", "compaction", "main"),
    ]
    bench.assert_is_the_engines_log()
    log = sorted((one.prompt, one.completion, one.logprobs) for one in bench.engine.log)
    rows = zip(made.prompt_token_ids, made.completion_token_ids, made.old_logprobs, strict=True)
    assert sorted(tuple(map(tuple, row)) for row in rows) == log
    sequences = training_sequences(made)
    written = sum(len(one.completion) for one in bench.engine.log)
    assert sum(one.trainable_tokens for one in sequences) == written
    own = training_sequences(made, MASKS["no_sub_agents@1"])
    assert [one.span for one in own] == ["main", "shorter"]
    assert bench.proxy.end("a") == []


async def test_what_nobody_declared_is_refused_with_the_reason_of_its_begin(
    bench: Bench, tmp_path: Path
) -> None:
    """By the default for being several, by `segments` for being of no kind."""
    await three_conversations(bench, None, None, None)

    with pytest.raises(ContractError, match=r"segment-1: the prompt has \d+ of the \d+ ids") as one:
        rollout(bench, tmp_path, "linear@1")
    assert one.value.rule == "linear_has_one_segment"
    with pytest.raises(ContractError) as other:
        rollout(bench, tmp_path)
    assert (other.value.rule, other.value.value) == ("segment_kinds_are_known", "unknown")
    assert "2 breaks" in bench.proxy.end("a")[0]


async def test_whoever_knows_may_declare_what_the_harness_did_not(
    bench: Bench, tmp_path: Path
) -> None:
    """Explicitly, for each conversation: what is left out stays of no kind."""
    await three_conversations(bench, None, None, None)
    said = {
        1: Declared(name="helper", kind="sub_agent", owner="main"),
        2: Declared(name="shorter", kind="compaction", owner="main"),
    }

    def declare(order: int, turns: Sequence[Turn]) -> Declared | None:
        assert turns
        return said.get(order)

    made = rollout(bench, tmp_path, declare=declare)
    assert [one.kind for one in made.spans] == ["main", "sub_agent", "compaction"]
    del said[2]
    with pytest.raises(ContractError, match="unknown"):
        rollout(bench, tmp_path, declare=declare)


@pytest.mark.parametrize("path", PATHS)
async def test_conversations_that_begin_alike_stay_apart_when_they_are_declared(
    bench: Bench, path: str
) -> None:
    """By their ids alone the sub-agent's second prompt could go on from either."""
    key = bench.mint()
    main = await say(bench, key, [user("the same")], MAIN, path)
    helper = await say(bench, key, [user("the same")], HELPER, path)
    await say(bench, key, [*helper, user("go on")], HELPER, path)
    await say(bench, key, [*main, user("go on")], MAIN, path)

    turns = bench.calls().turns
    assert [turn.call.segment for turn in turns] == [0, 1, 1, 0]
    assert [turn.call.extends > 0 for turn in turns] == [False, False, True, True]
    bench.assert_is_the_engines_log()


async def test_break_within_what_was_declared_is_refused(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """A template that rewrites history is no second sub-agent of that name."""
    async with make_bench(remembers=False) as bench:
        key = bench.mint()
        main = await say(bench, key, [user("do it")], MAIN)
        await say(bench, key, [*main, user("go on")], MAIN)

        assert [turn.call.segment for turn in bench.calls().turns] == [0, 1]
        with pytest.raises(ContractError) as refused:
            rollout(bench, tmp_path)
    assert refused.value.rule in {"segment_names_differ", "segments_begin_with_the_only_main"}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("main", "name"),
        ("name=a; kind=other", "kind"),
        ("kind=main", "name"),
        ("name=../x; kind=main", "name"),
        ("name=a; kind=main; more=1", "more"),
        ("name=a; kind=sub_agent; owner=../x", "owner"),
        ("name=a; kind=main; name=b", "twice"),
    ],
)
async def test_declaration_that_cannot_be_is_refused_by_field(
    bench: Bench, said: str, problem: str
) -> None:
    """Before the engine is asked: an answer that is lost is no turn."""
    key = bench.mint()
    async with bench.client(key) as client:
        headers = {"X-Coldframe-Segment": said}
        answer = await client.post(PATHS[0], json={"messages": [user("x")]}, headers=headers)

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("header x-coldframe-segment: ")
    assert problem in message
    assert bench.engine.requests == []


async def test_declarations_survive_a_proxy_that_was_killed(bench: Bench) -> None:
    """What goes on goes on in the segment of its own declaration."""
    key = bench.mint()
    main = await say(bench, key, [user("the same")], MAIN)
    helper = await say(bench, key, [user("the same")], HELPER)
    settings: ProxySettings = bench.proxy.settings
    async with Proxy(settings) as again:
        assert again.adopt(bench.directory) == 1
        segments = {
            one.index: one.declared and one.declared.name
            for one in again.by_name("a").open.values()
        }
    assert segments == {0: "main", 1: "helper"}
    assert main and helper
