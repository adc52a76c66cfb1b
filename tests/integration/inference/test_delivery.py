"""Who calls, what they may use, and what they received."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from coldframe.inference.app import ProxyApp
from coldframe.inference.dialects import CHAT as CHAT_DIALECT
from coldframe.inference.proxy import Proxy
from coldframe.inference.server import serving
from coldframe.protocol.errors import InvalidRequestError
from tests.doubles.engine import Lie, Stall, Status
from tests.fixtures.waiting import until
from tests.integration.inference.conftest import Bench, MakeBench

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "say hello"}]}


def following(*answers: httpx.Response) -> dict[str, Any]:
    """Return the request that goes on from answers."""
    messages = [*ASK["messages"]]
    for answer in answers:
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return {"messages": messages}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/models", "/nowhere"])
async def test_unknown_key_is_401_everywhere(bench: Bench, path: str) -> None:
    """A key is all that says whose tokens these are."""
    bench.mint()
    for headers in ({}, {"x-api-key": "sk-coldframe-x"}, {"authorization": "Basic x"}):
        async with httpx.AsyncClient(base_url=bench.url, headers=headers) as client:
            method = "GET" if path.endswith("models") else "POST"
            answer = await client.request(method, path, json=ASK)
        assert answer.status_code == 401
    assert bench.engine.requests == []


async def test_key_is_the_attempts_identity_and_ends_with_it(bench: Bench) -> None:
    """Attempts at the same time are told apart by nothing else; no file has a key."""
    keys = {name: bench.mint(name) for name in ("a", "b")}
    async with bench.client(keys["a"]) as one, bench.client(keys["b"]) as other:
        await asyncio.gather(*(client.post(CHAT, json=ASK) for client in (one, other, other)))
        bench.proxy.end("a")
        late = await one.post(CHAT, json=ASK)

    assert late.status_code == 401
    assert (len(bench.calls("a").turns), len(bench.calls("b").turns)) == (1, 2)
    assert (bench.calls("a").ended, bench.calls("b").ended) == (True, False)
    for name, key in keys.items():
        assert key not in (bench.directory / f"{name}.jsonl").read_text()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/x", ".x", "x" * 201, "a\0", "a\n"])
async def test_attempt_id_that_is_no_file_name_is_refused(bench: Bench, name: str) -> None:
    """It names a file beside others'."""
    with pytest.raises(InvalidRequestError):
        bench.proxy.mint(name, bench.directory / "x.jsonl")


async def test_attempt_is_begun_once(bench: Bench) -> None:
    """Two attempts in one journal could not be told apart."""
    bench.mint("a")
    with pytest.raises(InvalidRequestError):
        bench.mint("a")
    bench.proxy.end("a")
    with pytest.raises(InvalidRequestError):
        bench.mint("a")


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_left_by_the_engine_too(
    make_bench: MakeBench, stream: bool
) -> None:
    """An engine that goes on for nobody is paid for; an answer that nobody got is no turn."""
    async with make_bench(Stall(60)) as bench:
        async with bench.client(bench.mint()) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json={**ASK, "stream": stream}))
            await until(lambda: bench.engine.requests)
            asking.cancel()
            await until(lambda: bench.engine.left == 1)
            again = await client.post(CHAT, json=ASK)
            await client.post(CHAT, json=following(again))

        captured = bench.calls()
        assert [one.kind for one in captured.events] == ["gone"]
        assert [*captured.segments()] == [0]
        bench.assert_is_the_engines_log()


async def test_client_that_closes_at_once_has_received_its_answer(bench: Bench) -> None:
    """Many programs make a connection per call, and are gone as soon as they have it."""
    key = bench.mint()
    body: dict[str, Any] = ASK
    answers = []
    for _ in range(8):
        answer = await asyncio.to_thread(
            httpx.post, f"{bench.url}{CHAT}", json=body, headers={"x-api-key": key}
        )
        answers.append(answer)
        body = following(*answers)

    captured = bench.calls()
    assert (len(captured.turns), captured.abandoned, [*captured.segments()]) == (8, [], [0])
    bench.assert_is_the_engines_log()


def _long(answer: dict[str, Any]) -> None:
    answer["choices"][0]["message"]["content"] = "x" * (16 << 20)


async def test_client_that_leaves_within_an_answer_had_no_turn(make_bench: MakeBench) -> None:
    """Half an answer is in nobody's history."""
    async with make_bench(Lie(_long)) as bench:
        port = int(bench.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        content = json.dumps(ASK).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {bench.mint()}\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await reader.readexactly(100)
        writer.transport.abort()
        await until(lambda: bench.calls().abandoned)

        assert bench.calls().turns == []
        assert bench.calls().unsettled == []


async def test_answer_that_was_received_after_all_is_proven_by_the_next_prompt(
    bench: Bench,
) -> None:
    """The prompt holds its tokens: nobody else had them."""
    key = bench.mint()
    attempt = bench.proxy.by_name("a")
    own = attempt.handed_over
    attempt.handed_over = lambda call, place, *, delivered: own(call, place, delivered=False)  # type: ignore[method-assign]
    async with bench.client(key) as client:
        first = await client.post(CHAT, json=ASK)
        assert len(bench.calls().abandoned) == 1
        attempt.handed_over = own  # type: ignore[method-assign]
        await client.post(CHAT, json=following(first))

    assert [*bench.calls().segments()] == [0]
    bench.assert_is_the_engines_log()


@pytest.mark.parametrize("received", [True, False])
async def test_proxy_that_was_killed_goes_on_where_it_was(bench: Bench, received: bool) -> None:
    """Journals survive it; what it was about to hand over is settled by the next prompt."""
    key = bench.mint()
    attempt = bench.proxy.by_name("a")
    async with bench.client(key) as client:
        first = await client.post(CHAT, json=ASK)
        attempt.handed_over = lambda *_, **__: None  # type: ignore[method-assign]
        second = await client.post(CHAT, json=following(first))
    path = bench.directory / "a.jsonl"
    with path.open("ab") as file:
        file.write(b'{"type": "deliv')  # a line that it was writing
    assert len(bench.calls().unsettled) == 1

    async with Proxy(bench.proxy.settings) as proxy:
        assert proxy.adopt(bench.directory) == 1
        async with serving(ProxyApp(proxy)) as url:
            headers = {"x-api-key": key}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                body = following(first, second) if received else following(first)
                answer = await client.post(CHAT, json=body)
                assert answer.status_code == 200
        proxy.end("a")

    captured = bench.calls()
    assert (captured.ended, captured.unsettled, [*captured.segments()]) == (True, [], [0])
    assert (len(captured.turns), len(captured.abandoned)) == ((3, 0) if received else (2, 1))
    logged = [one.prompt for one in bench.engine.log]
    assert captured.turns[-1].prompt_token_ids == logged[-1]


async def test_proxy_that_was_killed_keeps_budgets_steps_and_arguments(bench: Bench) -> None:
    """What was asked and left counts as before; a step that had begun is gone on with."""
    key = bench.mint(calls=3)
    attempt = bench.proxy.by_name("a")
    async with bench.client(key) as client:
        own = attempt.handed_over
        attempt.handed_over = lambda call, place, *, delivered: own(call, place, delivered=False)  # type: ignore[method-assign]
        await client.post(CHAT, json=ASK)
        attempt.handed_over = lambda *_, **__: None  # type: ignore[method-assign]
        await client.post(CHAT, json={"messages": [{"role": "user", "content": "another"}]})
    bench.proxy.begin_step("a", "second")

    async with Proxy(bench.proxy.settings) as proxy:
        proxy.adopt(bench.directory)
        gone_on = proxy.by_name("a")
        assert (gone_on.calls, gone_on.tokens, gone_on.step) == (2, attempt.tokens, "second")
        assert gone_on.arguments == attempt.arguments != {}


@pytest.mark.parametrize("content", [b"", b'{"type":"att', b'{"type":"attempt"}\n', b"junk\n"])
async def test_journal_that_a_killed_proxy_had_just_begun_stops_no_other(
    bench: Bench, content: bytes
) -> None:
    """The proxy did not start any more, and every other attempt was lost with that one."""
    bench.mint()
    (bench.directory / "b.jsonl").write_bytes(content)

    async with Proxy(bench.proxy.settings) as proxy:
        assert proxy.adopt(bench.directory) == 1
        begun = content.endswith(b"\n")
        assert (bench.directory / "b.jsonl").exists() == begun
        if not begun:
            assert proxy.mint("b", bench.directory / "b.jsonl")


@pytest.mark.parametrize(
    ("budget", "words"), [({"calls": 1}, "1 of 1 calls"), ({"tokens": 5}, "5 of 5 tokens")]
)
async def test_budget_ends_in_a_stop_that_is_not_recorded(
    bench: Bench, budget: dict[str, Any], words: str
) -> None:
    """An error would be tried again by the harness for ever."""
    key = bench.mint(**budget)
    openais = bench.openai(key)
    anthropics = bench.anthropic(key)
    messages: Any = ASK["messages"]
    first = await openais.chat.completions.create(model="m", messages=messages)
    second = await openais.chat.completions.create(model="m", messages=messages)
    async with openais.responses.stream(model="m", input="x") as events:
        third = await events.get_final_response()
    fourth = await anthropics.messages.create(model="m", max_tokens=9, messages=messages)
    await openais.close()
    await anthropics.close()

    assert first.choices[0].finish_reason == ("length" if "tokens" in budget else "tool_calls")
    assert (second.choices[0].finish_reason, fourth.stop_reason) == ("stop", "end_turn")
    assert words in str(second.choices[0].message.content)
    assert words in third.output_text
    captured = bench.calls()
    assert (len(captured.turns), len(bench.engine.requests)) == (1, 1)
    assert {one.kind for one in captured.events} == {"budget"}


async def test_call_is_charged_once_the_engine_has_answered(bench: Bench) -> None:
    """Not once it is recorded: another call could come in before that, and who left just before
    each answer would use the engine for nothing."""
    bench.mint(calls=1)
    attempt = bench.proxy.by_name("a")
    await bench.proxy.ask(attempt, CHAT_DIALECT.ask(ASK, {}))

    assert attempt.exhausted() == "1 of 1 calls"
    assert attempt.tokens == len(bench.engine.log[0].completion)


@pytest.mark.parametrize(
    ("limit", "sent"),
    [(None, 50), (20, 20), (99, 50), ("12", None), (1.5, None), (True, None), (0, None)],
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_limit_of_tokens_is_a_number_or_none(
    bench: Bench, name: str, limit: Any, sent: int | None
) -> None:
    """Clients send null for none; what is no number could not be held to a budget."""
    async with bench.client(bench.mint(tokens=50)) as client:
        answer = await client.post(CHAT, json={**ASK, name: limit})

    if sent is None:
        assert answer.status_code == 400
        assert f"{name} is no integer" in answer.text
        assert bench.engine.requests == []
    else:
        assert answer.status_code == 200
        (asked,) = bench.engine.requests
        assert asked["max_tokens" if limit is None else name] == sent


@pytest.mark.parametrize("own", [{}, {"max_tokens": 4}])
async def test_calls_at_the_same_time_stay_within_a_budget_of_tokens(
    make_bench: MakeBench, own: dict[str, int]
) -> None:
    """Twenty sub-agents that each may use what is left would use twenty times of it."""
    async with make_bench(delay_s=0.1) as bench:
        async with bench.client(bench.mint(tokens=10)) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=ASK | own) for _ in range(20))
            )

        assert {one.status_code for one in answers} == {200}
        captured = bench.calls()
        asked = [one["max_tokens"] for one in bench.engine.requests if "top_k" not in one]
        assert asked == ([4, 4, 2] if own else [10])
        assert sum(turn.call.completion_tokens or 0 for turn in captured.turns) == 10
        assert [one.kind for one in captured.events] == ["budget"] * (20 - len(asked))


async def test_wall_budget_ends_a_call_that_waits(make_bench: MakeBench) -> None:
    """The engine is left, the harness is told."""
    async with make_bench(Stall(20)) as bench:
        async with bench.client(bench.mint(wall_s=0.3)) as client:
            answer = await client.post(CHAT, json=ASK)

        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        await until(lambda: bench.engine.left == 1)
        assert bench.calls().turns == []


async def test_pause_answers_429_and_drains_and_other_weights_are_named(
    make_bench: MakeBench,
) -> None:
    """Weights are changed when nothing is in flight, and each call says by which it was made."""
    async with make_bench(delay_s=0.3) as bench:
        async with bench.client(bench.mint()) as client:
            flying = asyncio.create_task(client.post(CHAT, json=ASK))
            await until(lambda: bench.engine.requests)
            bench.proxy.pause(7)
            pausing = asyncio.create_task(bench.proxy.drained())
            await asyncio.sleep(0.05)
            refused = await client.post(CHAT, json=ASK)
            assert not pausing.done()
            first = await flying
            await pausing
            bench.proxy.resume("b" * 64)
            await client.post(CHAT, json=following(first))

        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        versions = [turn.call.policy_version for turn in bench.calls().turns]
        assert versions == ["a" * 64, "b" * 64]
        assert not any(turn.call.policy_changed for turn in bench.calls().turns)


async def test_weights_that_change_under_a_call_are_told(make_bench: MakeBench) -> None:
    """Nobody can say which of them sampled it."""
    async with make_bench(delay_s=0.2) as bench:
        async with bench.client(bench.mint()) as client:
            flying = asyncio.create_task(client.post(CHAT, json=ASK))
            await until(lambda: bench.engine.requests)
            bench.proxy.resume("b" * 64)
            await flying

        assert bench.calls().turns[0].call.policy_changed


async def test_sampling_is_recorded_as_asked_and_as_sent(bench: Bench) -> None:
    """They differ, and only what was sent shaped the answer."""
    body = {"temperature": 0.5, "max_tokens": 99, "thinking": {"type": "enabled"}, **ASK}
    async with bench.client(bench.mint()) as client:
        await client.post("/v1/messages", json=body)
        await client.post(CHAT, json={**ASK, "logprobs": True, "top_logprobs": 3})

    first, second = (turn.call for turn in bench.calls().turns)
    assert first.sampling_asked == {k: v for k, v in body.items() if k != "messages"}
    assert first.sampling_sent == {"temperature": 0.5, "max_tokens": 99}
    assert bench.engine.requests[0]["model"] == "stand-in"
    assert "stream" not in bench.engine.requests[0]
    assert second.sampling_asked == {"logprobs": True, "top_logprobs": 3}
    assert bench.engine.requests[1]["top_logprobs"] == 3


async def test_conversations_side_by_side_are_segments_of_their_own(bench: Bench) -> None:
    """A sub-agent's calls between the main agent's: each goes on where its own ended."""
    async with bench.client(bench.mint()) as client:
        main = [await client.post(CHAT, json=ASK)]
        other = {"messages": [{"role": "user", "content": "another"}]}
        sub = await client.post(CHAT, json=other)
        main.append(await client.post(CHAT, json=following(*main)))
        messages = [*other["messages"], sub.json()["choices"][0]["message"]]
        await client.post(CHAT, json={"messages": [*messages, {"role": "user", "content": "?"}]})
        await client.post(CHAT, json=ASK)  # the first again: another answer to the same

    segments = bench.calls().segments()
    assert {index: len(turns) for index, turns in segments.items()} == {0: 2, 1: 2, 2: 1}
    assert [turns[0].call.broke is None for turns in segments.values()] == [True, False, False]
    bench.assert_is_the_engines_log()


async def test_steps_of_a_task_are_conversations_of_their_own(bench: Bench) -> None:
    """What a later step says is not taken for going on with an earlier one."""
    async with bench.client(bench.mint()) as client:
        for step in ("one", "two"):
            bench.proxy.begin_step("a", step)
            await client.post(CHAT, json=ASK)

    captured = bench.calls()
    assert [len(captured.segments(step)) for step in ("one", "two", "")] == [1, 1, 0]
    assert all(turn.call.broke is None for turn in captured.turns)


async def test_calls_at_once_are_all_recorded_exactly(make_bench: MakeBench) -> None:
    """Attempts × turns in flight together, some tried again."""
    faults = [Status(503) if one % 7 == 3 else None for one in range(60)]
    async with make_bench(*faults) as bench:

        async def attempt(name: str) -> None:
            answers: list[httpx.Response] = []
            async with bench.client(bench.mint(name)) as client:
                for _ in range(4):
                    body = following(*answers)
                    body["messages"][0] = {"role": "user", "content": name}
                    # By chance all tries of one call may meet a fault: a harness asks again.
                    while (answer := await client.post(CHAT, json=body)).status_code == 503:
                        pass
                    answers.append(answer)

        names = [f"attempt-{one}" for one in range(12)]
        await asyncio.gather(*map(attempt, names))

        logged = {(one.prompt, one.completion, one.logprobs) for one in bench.engine.log}
        found = set()
        for name in names:
            captured = bench.calls(name)
            assert [*captured.segments()] == [0]
            for turn in captured.turns:
                columns = (turn.call.completion_token_ids, turn.call.logprobs)
                found.add((turn.prompt_token_ids, *columns))
        assert found == logged
        assert len(found) == 48


async def test_journal_that_is_full_ends_the_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness in a loop must not fill the disk, and what it did is not cut in silence."""
    monkeypatch.setattr("coldframe.inference.attempts.MAX_JOURNAL_BYTES", 1000)
    async with bench.client(bench.mint()) as client:
        await client.post(CHAT, json=ASK)
        answer = await client.post(CHAT, json=ASK)

    assert "bytes of records" in answer.json()["choices"][0]["message"]["content"]
    captured = bench.calls()
    assert (len(captured.turns), [one.kind for one in captured.events]) == (1, ["budget"])
