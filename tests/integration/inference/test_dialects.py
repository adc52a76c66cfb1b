"""Every API that harnesses speak, by the providers' own clients, streaming and not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.engine import MERGES
from tests.integration.inference.conftest import Bench, MakeBench

TOOL = {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}
COMMAND = '{"command":  "echo hello 0"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_by_openais_client(bench: Bench, stream: bool) -> None:
    """A conversation of three answers, in which a tool is called and answered."""
    client = bench.openai(bench.mint())
    messages: list[Any] = [{"role": "user", "content": "say hello"}]
    tools: Any = [{"type": "function", "function": TOOL}]
    for turn in range(3):
        if stream:
            async with client.chat.completions.stream(
                model="gpt",
                messages=messages,
                tools=tools,
                temperature=0.7,
                stream_options={"include_usage": True},
            ) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(
                model="gpt", messages=messages, tools=tools, temperature=0.7
            )
        message = answer.choices[0].message
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(bench.engine.log[turn].completion)
        assert answer.choices[0].logprobs is None
        assert not hasattr(answer.choices[0], "token_ids")
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for one in messages[-1].get("tool_calls") or ():
            one["function"].pop("parsed_arguments", None)
            assert one["function"]["arguments"].startswith('{"command":  "echo hello')
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": "hello\n"})
        reason = answer.choices[0].finish_reason
        assert reason == ("tool_calls" if turn % 2 == 0 else "stop")
        if turn % 2:
            messages.append({"role": "user", "content": "go on"})
    await client.close()

    bench.assert_is_the_engines_log()
    _assert_one_conversation(bench, "chat")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_by_openais_client(bench: Bench, stream: bool) -> None:
    """The same conversation in items."""
    client = bench.openai(bench.mint())
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "say hello"}]}]
    tools: Any = [{"type": "function", "strict": None, **TOOL}]
    asked: Any = {"model": "gpt", "instructions": "Be brief.", "tools": tools, "temperature": 0.7}
    for turn in range(3):
        if stream:
            async with client.responses.stream(input=items, **asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(input=items, **asked)
        assert answer.status == "completed"
        assert answer.usage is not None
        assert answer.usage.output_tokens == len(bench.engine.log[turn].completion)
        for item in answer.output:
            items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
            if item.type == "function_call":
                assert item.arguments.startswith('{"command":  "echo hello')
                output = {"type": "function_call_output", "call_id": item.call_id}
                items.append({**output, "output": "hello\n"})
            else:
                assert answer.output_text.startswith("hello")
        if turn % 2:
            items.append({"role": "user", "content": "go on"})
    await client.close()

    bench.assert_is_the_engines_log()
    _assert_one_conversation(bench, "responses")


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_by_anthropics_client(bench: Bench, stream: bool) -> None:
    """Arguments come to the client parsed; what goes back to the engine is what it wrote."""
    client = bench.anthropic(bench.mint())
    messages: list[Any] = [{"role": "user", "content": "say hello"}]
    tool: Any = {"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}
    asked: Any = {"model": "claude", "max_tokens": 512, "system": "Be brief.", "tools": [tool]}
    for turn in range(3):
        if stream:
            async with client.messages.stream(messages=messages, **asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(messages=messages, **asked)
        assert answer.stop_reason == ("tool_use" if turn % 2 == 0 else "end_turn")
        assert answer.usage.output_tokens == len(bench.engine.log[turn].completion)
        blocks = [one.model_dump(exclude_none=True) for one in answer.content]
        for block in blocks:
            block.pop("parsed_output", None)
        messages.append({"role": "assistant", "content": blocks})
        results = []
        for block in blocks:
            if block["type"] == "tool_use":
                assert block["input"] == {"command": f"echo hello {turn}"}
                result = {"type": "tool_result", "tool_use_id": block["id"], "content": "hello\n"}
                results.append(result)
        messages.append({"role": "user", "content": results or "go on"})
    await client.close()

    bench.assert_is_the_engines_log()
    _assert_one_conversation(bench, "messages")
    sent = bench.engine.requests[1]["messages"][2]
    assert sent["tool_calls"][0]["function"]["arguments"] == COMMAND


def _assert_one_conversation(bench: Bench, dialect: str) -> None:
    captured = bench.calls()
    assert [*captured.segments()] == [0]
    assert {turn.call.dialect for turn in captured.turns} == {dialect}
    assert {turn.call.model_asked for turn in captured.turns} <= {"gpt", "claude"}
    # What a tokenizer makes of `hello` is one id; the engine sampled two.
    sampled = captured.turns[0].call.completion_token_ids or ()
    assert MERGES["hello"] not in sampled
    assert {MERGES["he"], MERGES["llo"]} <= set(sampled)


async def test_answer_that_is_cut_says_so_in_every_dialect(bench: Bench) -> None:
    """A harness that takes a cut answer for a whole one acts on half a command."""
    async with bench.client(bench.mint()) as client:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        found = [
            (await client.post(path, json=body)).json()
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/messages", chat),
                ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
            )
        ]

    assert found[0]["choices"][0]["finish_reason"] == "length"
    assert found[1]["stop_reason"] == "max_tokens"
    assert found[2]["status"] == "incomplete"
    assert found[2]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("path", "headers", "body", "shape"),
    [
        ("/v1", {}, {"messages": [{"role": "user", "content": "x"}]}, "choices"),
        ("/", {}, {"input": "x"}, "output"),
        ("/v1", {"anthropic-version": "1"}, {"messages": [], "max_tokens": 9}, "stop_reason"),
        ("/any/prefix/chat/completions", {}, {"messages": [{"role": "user"}]}, "choices"),
    ],
)
async def test_dialect_is_told_by_path_header_and_body(
    bench: Bench, path: str, headers: dict[str, str], body: dict[str, Any], shape: str
) -> None:
    """Harnesses put the API's path together in their own ways."""
    async with bench.client(bench.mint()) as client:
        answer = await client.post(path, headers=headers, json=body)

    assert answer.status_code == 200, answer.text
    assert shape in answer.json()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "n": 2}, "n:"),
        ("/v1/chat/completions", {"messages": "x"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "model": 1}, "model"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "x", "new_thing": 1}, "new_thing"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/chat/completions", {"messages": [{}], "lora_path": "mine"}, "lora_path"),
        ("/v1/chat/completions", {"messages": [{}], "bootstrap_host": "x"}, "bootstrap_host"),
        ("/v1/messages", {"messages": [], "new_thing": 1}, "new_thing"),
        ("/v1/messages", {"messages": [{"role": "tool", "content": ""}]}, "tool"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "pdf"}]}]}, "pdf"),
        ("/v1/messages", {"messages": [{"role": "user", "content": 7}]}, "content"),
    ],
)
async def test_what_could_not_be_passed_on_as_meant_is_refused_by_name(
    bench: Bench, path: str, body: dict[str, Any], named: str
) -> None:
    """Left out in silence, it would make another request."""
    async with bench.client(bench.mint()) as client:
        answer = await client.post(path, json=body)

    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert bench.engine.requests == []


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{", b'{"temperature": NaN}', b"\xff", b"[" * 99999),
        *(b'{"messages": [], "messages": [{}]}', b'{"x":' + b"[" * 93 + b"]" * 93 + b"}"),
    ],
)
async def test_request_that_is_no_json_object_is_refused(bench: Bench, content: bytes) -> None:
    """Nothing that a harness sends may cost more than its own call."""
    async with bench.client(bench.mint()) as client:
        answer = await client.post("/v1/chat/completions", content=content)

    assert answer.status_code == 400


async def test_auxiliary_routes_are_answered_and_not_recorded(bench: Bench) -> None:
    """Clients ask for models before they begin, and count before they send."""
    key = bench.mint()
    anthropics = bench.anthropic(key)
    openais = bench.openai(key)
    messages: Any = [{"role": "user", "content": "hello"}]
    counted = await anthropics.messages.count_tokens(model="claude", messages=messages)
    models = [one.id async for one in openais.models.list()]
    model = await openais.models.retrieve("gpt")
    theirs = [one.id async for one in anthropics.models.list()]
    await openais.close()
    await anthropics.close()

    assert counted.input_tokens == len(bench.engine.render(messages))
    assert (models, theirs, model.id) == (["stand-in"], ["stand-in"], "gpt")
    assert bench.calls().turns == []
    assert bench.engine.requests == []


async def test_stream_that_waits_is_kept_alive_and_then_whole(make_bench: MakeBench) -> None:
    """A harness takes a stream in which nothing comes for a dead one."""
    async with make_bench(delay_s=0.5, keep_alive_s=0.1) as bench:
        key = bench.mint()
        messages: Any = [{"role": "user", "content": "x"}]
        async with bench.client(key) as client:
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                body = {"input": "x"} if path.endswith("responses") else {"messages": messages}
                answer = await client.post(path, json={**body, "stream": True})
                kept = b"event: ping\n" if path.endswith("messages") else b": keep-alive\n"
                assert answer.content.count(kept) >= 3
        theirs = bench.anthropic(key)
        async with theirs.messages.stream(model="m", max_tokens=99, messages=messages) as events:
            assert (await events.get_final_message()).stop_reason == "tool_use"
        ours = bench.openai(key)
        async with ours.chat.completions.stream(model="m", messages=messages) as chunks:
            assert (await chunks.get_final_completion()).choices[0].finish_reason == "tool_calls"
        await theirs.close()
        await ours.close()
        bench.assert_is_the_engines_log()
