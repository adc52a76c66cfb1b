"""An engine that lies, breaks and stalls may cost an attempt, and never gives a wrong record."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from coldframe.learning.contracts import (
    ContractError,
    PolicyIdentity,
    PolicyRollout,
    Segment,
    Trial,
)
from coldframe.protocol.errors import InferenceError
from coldframe.trajectories.calls import Level
from tests.doubles.engine import Answer, Fault, Lie, Raw, Stall, Status
from tests.integration.inference.conftest import Bench, MakeBench

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "say hello"}]}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def asked(path: str) -> dict[str, Any]:
    return {"input": "say hello"} if path.endswith("responses") else ASK


def at(*path: str | int, value: Any) -> Lie:
    """Put a value in a place of the answer."""

    def change(answer: Answer) -> None:
        place: Any = answer
        for one in path[:-1]:
            place = place[one]
        place[path[-1]] = value

    return Lie(change)


def measured(logprob: float) -> bytes:
    choice = {"message": {"content": "x"}, "logprobs": {"content": [{"logprob": logprob}]}}
    return json.dumps({"choices": [choice]}).encode()


def edit(change: Callable[[Answer], Any]) -> Lie:
    return Lie(lambda answer: (change(answer), None)[1])


def _twice(answer: Answer) -> None:
    """A delta that came twice: ids and log-probabilities are as many, and both wrong."""
    choice = answer["choices"][0]
    choice["token_ids"] *= 2
    choice["logprobs"]["content"] *= 2


CHOICE = ("choices", 0)
FIRST = (*CHOICE, "logprobs", "content", 0, "logprob")
LIES = {
    "no prompt ids": edit(lambda one: one.pop("prompt_token_ids")),
    "no ids": edit(lambda one: one["choices"][0].pop("token_ids")),
    "null ids": at(*CHOICE, "token_ids", value=None),
    "empty ids": at(*CHOICE, "token_ids", value=[]),
    "prompt ids in two places": edit(
        lambda one: one["choices"][0].update(prompt_token_ids=one["prompt_token_ids"])
    ),
    "empty prompt": at("prompt_token_ids", value=[]),
    "ids are text": at(*CHOICE, "token_ids", value="12345"),
    "an id is missing": edit(lambda one: one["choices"][0]["token_ids"].pop()),
    "an id is repeated": edit(lambda one: one["choices"][0]["token_ids"].append(310)),
    "a prompt id is missing": edit(lambda one: one["prompt_token_ids"].pop(2)),
    "a prompt id is repeated": edit(lambda one: one["prompt_token_ids"].insert(0, 301)),
    "an id is a bool": at(*CHOICE, "token_ids", 0, value=True),
    "an id is a float": at(*CHOICE, "token_ids", 0, value=1.0),
    "an id is text": at(*CHOICE, "token_ids", 0, value="1"),
    "an id is negative": at("prompt_token_ids", 0, value=-1),
    "an id is huge": at("prompt_token_ids", 0, value=1 << 32),
    "an id is null": at("prompt_token_ids", 0, value=None),
    "no log-probabilities": at(*CHOICE, "logprobs", value=None),
    "log-probabilities are a list": at(*CHOICE, "logprobs", value=[-1.0]),
    "one is missing": edit(lambda one: one["choices"][0]["logprobs"]["content"].pop()),
    "one too many": edit(
        lambda one: one["choices"][0]["logprobs"]["content"].append({"logprob": -1})
    ),
    "one is positive": at(*FIRST, value=1e-9),
    "one is null": at(*FIRST, value=None),
    "one is a bool": at(*FIRST, value=False),
    "one is text": at(*FIRST, value="-1"),
    "one is huge": at(*FIRST, value=-(10**400)),
    "no usage": edit(lambda one: one.pop("usage")),
    "usage counts one less": edit(
        lambda one: one["usage"].update(completion_tokens=one["usage"]["completion_tokens"] - 1)
    ),
    "usage counts another prompt": at("usage", "prompt_tokens", value=1),
    "usage is a bool": at("usage", "prompt_tokens", value=True),
    "everything twice": edit(_twice),
}


def rollout(bench: Bench) -> PolicyRollout:
    """What the contract makes of what was captured."""
    captured = bench.calls()
    turns = captured.turns
    segment = Segment(
        prompt_token_ids=[one.prompt_token_ids for one in turns],
        completion_token_ids=[one.call.completion_token_ids for one in turns],
        logprobs=[one.call.logprobs for one in turns],
    )
    trial = Trial(
        trial_name="a",
        task_name="a",
        split="train",
        rewards={"reward": 1.0},
        segments=[segment],
        policy=PolicyIdentity("a" * 64, "t", "r", {}, 0),
        capture=captured.level.value,
    )
    return PolicyRollout.from_trial(trial)


@pytest.mark.parametrize("name", LIES)
async def test_lie_of_the_engine_is_told_and_never_recorded_as_tokens(
    make_bench: MakeBench, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The harness gets its answer; the attempt can no longer be trained on, and says why."""
    async with make_bench(LIES[name]) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post("/v1/chat/completions", json=ASK)

        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        (turn,) = bench.calls().turns
        assert turn.call.level is not Level.TOKENS
        assert turn.call.flaws != ()
        (loud,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert turn.call.flaws[0] in loud
        assert "cannot be trained on" in loud
        assert turn.call.completion_token_ids is turn.call.prompt_token_ids is None
        with pytest.raises(ContractError) as refused:
            rollout(bench)
        assert refused.value.rule == "capture_has_tokens"


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_of_sglangs_form_are_captured_as_they_are(
    make_bench: MakeBench, path: str
) -> None:
    """It has the ids of the prompt in the choice; whoever looks beside it finds none."""
    async with make_bench(form="sglang") as bench:
        async with bench.client(bench.mint()) as client:
            for _ in range(2):
                answer = await client.post(path, json=asked(path))
                assert answer.status_code == 200, answer.text

        assert {one.call.level for one in bench.calls().turns} == {Level.TOKENS}
        bench.assert_is_the_engines_log()


IMAGE = "data:image/png;base64,iVBORw0KGgo="
SHOWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}
        ]
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]
    },
    "/v1/messages": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "url", "url": IMAGE}}],
            }
        ]
    },
}


@pytest.mark.parametrize("path", SHOWN)
async def test_prompt_with_an_image_is_not_captured_as_tokens(bench: Bench, path: str) -> None:
    """Every image of a size has the same ids: training on them is training on another prompt."""
    async with bench.client(bench.mint()) as client:
        answer = await client.post(path, json=SHOWN[path])
        assert answer.status_code == 200, answer.text

    captured = bench.calls()
    (turn,) = captured.turns
    assert captured.level is Level.LOGPROBS
    assert turn.call.prompt_token_ids is None
    assert "'image_url', of which ids tell nothing" in turn.call.flaws[0]
    assert bench.proxy.end("a")[0].endswith("of which ids tell nothing")


BROKEN: dict[str, Fault] = {
    "hangs up": Raw(b'{"choices": [', 1000),
    "is no JSON": Raw(b"<html>"),
    "is a list": Raw(b"[]"),
    "is deep": Raw(b"[" * 100_000),
    "has no choice": Raw(b'{"choices": []}'),
    "has two choices": Raw(b'{"choices": [{"message": {}}, {"message": {}}]}'),
    "has no message": Raw(b'{"choices": [{"message": "hello"}]}'),
    "has a broken call": Raw(b'{"choices": [{"message": {"tool_calls": [{"id": 1}]}}]}'),
    "is not text": Raw(b'{"choices": [{"message": {"content": 7}}]}'),
    "has NaN": Raw(b'{"choices": [{"message": {"content": "x", "more": NaN}}]}'),
    "has a log-probability that is NaN": Raw(measured(math.nan)),
    "has a log-probability that is -inf": Raw(measured(-math.inf)),
    "says two things": Raw(b'{"choices": [], "choices": [{"message": {"content": "x"}}]}'),
    "is deeper than a journal": Raw(
        b'{"choices": [{"message": {"content": "x", "more": %s1%s}}]}' % (b"[" * 90, b"]" * 90)
    ),
    "is 500": Status(500),
    "is 429": Status(429, headers=("Retry-After: 0",)),
    "is a redirect": Status(302, headers=("Location: http://127.0.0.1:1/",)),
    "stalls": Stall(),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_try_that_fails_is_made_again_and_recorded(make_bench: MakeBench, name: str) -> None:
    """A passing fault costs time, and is in the record of the call."""
    async with make_bench(BROKEN[name], request_s=0.3) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post("/v1/chat/completions", json=ASK)

        assert answer.status_code == 200
        (turn,) = bench.calls().turns
        assert len(turn.call.retries) == 1
        assert turn.call.level is Level.TOKENS
        bench.assert_is_the_engines_log()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_engine_that_fails_every_time_is_an_error_and_no_turn(
    make_bench: MakeBench, path: str, stream: bool
) -> None:
    """In the client's own dialect, with the status that its library acts on."""
    storm = [Status(429, headers=("Retry-After: 0",))] * 3
    async with make_bench(*storm) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post(path, json={**asked(path), "stream": stream})
            again = await client.post(path, json=asked(path))

        assert answer.status_code == 429
        error = answer.json()["error"]
        assert "scripted" in error["message"]
        assert error["type"] == "rate_limit_error"
        assert again.status_code == 200
        captured = bench.calls()
        assert [one.kind for one in captured.events] == ["failed"]
        assert len(captured.events[0].retries) == 2
        bench.assert_is_the_engines_log()


@pytest.mark.parametrize("path", PATHS)
async def test_stream_that_had_begun_ends_in_an_error(make_bench: MakeBench, path: str) -> None:
    """Its status was sent already; an end without a word would look like an answer."""
    async with make_bench(Status(400), delay_s=0.2, keep_alive_s=0.05) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post(path, json={**asked(path), "stream": True})

        assert answer.status_code == 200
        assert b"scripted" in answer.content
        assert b"[DONE]" not in answer.content
        assert bench.calls().turns == []


async def test_engine_that_says_a_wait_without_end_is_answered_for(make_bench: MakeBench) -> None:
    """Digits that come to infinity were the proxy's own failure, which nobody waits for."""
    storm = [Status(429, headers=(f"Retry-After: {'9' * 400}",))]
    async with make_bench(*storm, retries=0) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post("/v1/chat/completions", json=ASK)

        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3600")


async def test_key_that_the_engine_repeats_reaches_neither_harness_nor_journal(
    make_bench: MakeBench,
) -> None:
    """A harness runs in a sandbox: what it is told, the agent may read."""
    secret = "sk-engine-0123456789"
    said = json.dumps({"error": {"message": f"invalid key {secret}"}}).encode()
    async with make_bench(Status(401, said), api_key=secret) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post("/v1/chat/completions", json=ASK)

        assert answer.status_code == 401
        assert "invalid key [redacted]" in answer.text
        assert secret not in (bench.directory / "a.jsonl").read_text()


async def test_context_that_is_full_is_said_as_the_engine_says_it(make_bench: MakeBench) -> None:
    """Harnesses act on that code: for them it is the policy's end, not a fault."""
    body = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    async with make_bench(Status(400, body)) as bench:
        async with bench.client(bench.mint()) as client:
            answer = await client.post("/v1/chat/completions", json=ASK)

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert len(bench.engine.requests) == 1


async def test_engine_that_is_gone_is_said(make_bench: MakeBench) -> None:
    """Not as a hanging call."""
    async with make_bench() as bench:
        bench.engine._server.close()
        for task in [*bench.engine._open]:
            task.cancel()
        await asyncio.sleep(0)
        async with bench.client(bench.mint()) as client:
            answer = await client.post("/v1/chat/completions", json=ASK)

    assert answer.status_code == 502
    said = answer.json()["error"]["message"]
    assert "no connection to 127.0.0.1:" in said
    assert said.endswith("Connection refused")
    assert bench.calls().turns == []


async def test_template_that_writes_history_anew_breaks_the_segment(
    make_bench: MakeBench,
) -> None:
    """`hello` was sampled as two tokens, and comes back as one: another history."""
    async with make_bench(remembers=False) as bench:
        async with bench.client(bench.mint()) as client:
            messages = [*ASK["messages"]]
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json={"messages": messages})
                message = answer.json()["choices"][0]["message"]
                messages += [message, {"role": "tool", "tool_call_id": "x", "content": "hello"}]

        first, second = bench.calls().turns
        assert (first.call.segment, second.call.segment) == (0, 1)
        had = len(first.prompt_token_ids) + len(first.call.completion_token_ids or ())
        assert second.call.broke is not None
        assert second.call.broke.model_dump() == {
            "nearest": 0,
            "shared": len(first.prompt_token_ids),
            "had": had,
        }
        bench.assert_is_the_engines_log()
        with pytest.raises(ContractError):
            rollout(bench)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"script": None}, "does not answer the probe"),
    ],
)
async def test_engine_that_gives_something_else_is_refused_at_the_start(
    make_bench: MakeBench, engine: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities before temperature are of another policy than the one that sampled."""
    if engine.get("script", 0) is None:
        monkeypatch.setattr("tests.doubles.engine.StandInEngine._probed", lambda *_: {"choices": 1})
    with pytest.raises(InferenceError, match=words):
        async with make_bench(**engine):
            raise AssertionError("it served")


@pytest.mark.parametrize("level", [Level.TEXT, Level.LOGPROBS])
async def test_lower_level_records_less_and_cannot_be_trained_on(
    make_bench: MakeBench, level: Level
) -> None:
    """What is not captured is not there, rather than made up."""
    async with make_bench(capture=level) as bench:
        async with bench.client(bench.mint()) as client:
            await client.post("/v1/chat/completions", json=ASK)

        assert bench.calls().level is level
        (call,) = [turn.call for turn in bench.calls().turns]
        assert call.completion_token_ids is None
        assert (call.logprobs is not None) == (level is Level.LOGPROBS)
        assert call.message["content"] == "hello"
        with pytest.raises(ContractError):
            rollout(bench)
