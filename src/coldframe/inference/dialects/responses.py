"""OpenAI's responses, without state: each request holds its whole conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coldframe.inference.dialects.base import (
    Asked,
    Json,
    RefusedError,
    asked_of,
    event,
    openai_error,
    pieces,
    reported,
    texts,
    unknown_fields,
    wanted,
)

_PASSED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
}
_NOTED = frozenset(
    {"store", "metadata", "user", "include", "truncation", "service_tier", "stream_options"}
    | {"prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
"""About the provider's service, not about what is to be sampled; kept in the record."""
_CONVERSATION = frozenset({"input", "instructions", "tools", "model", "stream"})
_KNOWN = _NOTED | _CONVERSATION | {*_PASSED, "tool_choice", "text", "reasoning"}
_TEXTS = frozenset({"input_text", "output_text", "reasoning_text", "text"})
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


class Responses:
    """See `Dialect`, whose protocol it keeps."""

    name = "responses"
    keep_alive = b": keep-alive\n\n"

    def ask(self, body: Json, arguments: Mapping[str, str]) -> Asked:
        del arguments
        stated = next((name for name in _STATEFUL if body.get(name)), None)
        if stated is not None:
            raise RefusedError(400, f"{stated}: nothing is kept here; send the whole input")
        body = {name: value for name, value in body.items() if name not in _STATEFUL}
        unknown_fields(body, _KNOWN, "responses")
        chat: Json = {"messages": _messages(body)}
        for name, own in _PASSED.items():
            if body.get(name) is not None:
                chat[own] = body[name]
        if body.get("tools"):
            chat["tools"] = [_tool(one) for one in wanted(body["tools"], list, "tools")]
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            if choice.get("type") != "function":
                raise RefusedError(400, f"tool_choice {choice.get('type')!r} is not supported here")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        if choice is not None:
            chat["tool_choice"] = choice
        chat |= _format(body.get("text"))
        reasoning = body.get("reasoning")
        if isinstance(reasoning, dict) and reasoning.get("effort"):
            chat["reasoning_effort"] = reasoning["effort"]
        return asked_of(body, chat, _CONVERSATION)

    def answer(self, answer: Json, asked: Asked) -> Json:
        choice = answer["choices"][0]
        cut = choice.get("finish_reason") == "length"
        prompt, completion, cached = reported(answer.get("usage"))
        body = asked.original
        return {
            "id": f"resp_{answer.get('id', '0')}",
            "object": "response",
            "created_at": answer.get("created", 0),
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": answer.get("model") or asked.model,
            "output": _output(choice["message"], str(answer.get("id", "0")), cut),
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "max_output_tokens": body.get("max_output_tokens"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "text": body.get("text") or {"format": {"type": "text"}},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + completion,
            },
        }

    def events(self, answer: Json, asked: Asked) -> Iterator[bytes]:
        del asked
        count = iter(range(1 << 62))

        def send(kind: str, **more: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(count), **more}, kind)

        begin = {**answer, "status": "in_progress", "output": [], "usage": None}
        begin["incomplete_details"] = None
        yield send("response.created", response=begin)
        yield send("response.in_progress", response=begin)
        for index, item in enumerate(answer["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            called = item["type"] == "function_call"
            empty = {**item, "status": "in_progress"}
            empty["arguments" if called else "content"] = "" if called else []
            yield send("response.output_item.added", output_index=index, item=empty)
            if called:
                kind = "response.function_call_arguments"
                for piece in pieces(item["arguments"]):
                    yield send(f"{kind}.delta", **at, delta=piece)
                yield send(f"{kind}.done", **at, name=item["name"], arguments=item["arguments"])
            else:
                for number, part in enumerate(item["content"]):
                    yield from _part(send, {**at, "content_index": number}, part)
            yield send("response.output_item.done", output_index=index, item=item)
        yield send(f"response.{answer['status']}", response=answer)

    def error(self, error: RefusedError) -> Json:
        return openai_error(error)

    def error_event(self, error: RefusedError) -> bytes:
        told = openai_error(error)["error"]
        value = {"type": "error", "code": told["code"], "message": told["message"], "param": None}
        return event({**value, "sequence_number": 0}, "error")


def _part(send: Any, at: Json, part: Json) -> Iterator[bytes]:
    thought = part["type"] == "reasoning_text"
    kind = "response.reasoning_text" if thought else "response.output_text"
    more: Json = {} if thought else {"logprobs": []}
    yield send("response.content_part.added", **at, part={**part, "text": ""})
    for piece in pieces(part["text"]):
        yield send(f"{kind}.delta", **at, delta=piece, **more)
    yield send(f"{kind}.done", **at, text=part["text"], **more)
    yield send("response.content_part.done", **at, part=part)


def _output(message: Json, answer_id: str, cut: bool) -> list[Json]:
    status = "incomplete" if cut else "completed"
    output: list[Json] = []
    if message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        output.append(
            {"id": f"rs_{answer_id}", "type": "reasoning", "summary": [], "content": [thought]}
        )
    if message.get("content"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append(
            {
                "id": f"msg_{answer_id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for number, call in enumerate(message.get("tool_calls") or ()):
        output.append(
            {
                "id": f"fc_{answer_id}_{number}",
                "type": "function_call",
                "status": status,
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return output


def _messages(body: Json) -> list[Json]:
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    begun = False  # whether the items before this one are of one answer of the model's
    for number, item in enumerate(wanted(given, list, "input")):
        where = f"input[{number}]"
        kind = wanted(item, dict, where).get("type", "message")
        own = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if own:
            if not begun:
                messages.append({"role": "assistant", "content": None})
            _add(messages[-1], item, kind, where)
        elif kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call_output":
            text = _text(item.get("output"), where)
            called = wanted(item.get("call_id"), str, f"{where}.call_id")
            messages.append({"role": "tool", "tool_call_id": called, "content": text})
        else:
            raise RefusedError(400, f"{where}: an item of type {kind!r} is not supported here")
        begun = own
    return messages


def _add(message: Json, item: Json, kind: str, where: str) -> None:
    if kind == "function_call":
        names = ("call_id", "name", "arguments")
        call_id, name, arguments = (wanted(item.get(one), str, f"{where}.{one}") for one in names)
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )
    elif kind == "reasoning":
        if item.get("content"):
            text = _text(item["content"], where)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    else:
        message["content"] = (message["content"] or "") + _text(item.get("content"), where)


def _message(item: Json, where: str) -> Json:
    role = {"developer": "system"}.get(item.get("role", ""), item.get("role"))
    if role not in ("user", "system"):
        raise RefusedError(400, f"{where}: role {role!r} is not supported here")
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    if not any(isinstance(one, dict) and one.get("type") == "input_image" for one in parts):
        return {"role": role, "content": _text(content, where)}
    found = []
    for part in parts:
        if part.get("type") == "input_image":
            url = wanted(part.get("image_url"), str, f"{where}.image_url")
            found.append({"type": "image_url", "image_url": {"url": url}})
        else:
            found.append({"type": "text", "text": _text([part], where)})
    return {"role": role, "content": found}


def _text(content: Any, where: str) -> str:
    return "".join(texts(content, _TEXTS, where))


def _tool(tool: Any) -> Json:
    kind = wanted(tool, dict, "tools[]").get("type")
    if kind != "function":
        raise RefusedError(400, f"tools: {kind!r} is the provider's own and not offered here")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _format(text: Any) -> Json:
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict) or form.get("type") == "text":
        return {}
    if form.get("type") != "json_schema":
        return {"response_format": form}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
