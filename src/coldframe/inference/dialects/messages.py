"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from coldframe.inference.dialects.base import (
    STATUS_NAMES,
    Asked,
    Json,
    RefusedError,
    asked_of,
    event,
    pieces,
    reported,
    texts,
    unknown_fields,
    wanted,
)

_PASSED = ("max_tokens", "temperature", "top_p", "top_k")
_NOTED = ("metadata", "thinking", "service_tier", "context_management", "output_config", "betas")
"""About the provider's service, not about what is to be sampled; kept in the record."""
_CONVERSATION = frozenset({"messages", "system", "tools", "model", "stream"})
_KNOWN = _CONVERSATION | {*_PASSED, *_NOTED, "tool_choice", "stop_sequences", "cache_control"}
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_TEXTS = frozenset({"text"})
_UNPARSED = "_arguments"
"""Holds arguments of a tool call that are no JSON object, which is all that this API can show."""


class Messages:
    """See `Dialect`, whose protocol it keeps."""

    name = "messages"
    keep_alive = event({"type": "ping"}, "ping")

    def ask(self, body: Json, arguments: Mapping[str, str]) -> Asked:
        unknown_fields(body, _KNOWN, "messages")
        messages: list[Json] = []
        system = _text(body.get("system") or "", "system")
        if system:
            messages.append({"role": "system", "content": system})
        for number, one in enumerate(wanted(body.get("messages"), list, "messages")):
            where = f"messages[{number}]"
            messages += _message(wanted(one, dict, where), where, arguments)
        chat: Json = {"messages": messages}
        chat |= {name: body[name] for name in _PASSED if body.get(name) is not None}
        if body.get("stop_sequences"):
            chat["stop"] = body["stop_sequences"]
        if body.get("tools"):
            chat["tools"] = [_tool(one) for one in wanted(body["tools"], list, "tools")]
        chat |= _choice(body.get("tool_choice"))
        return asked_of(body, chat, _CONVERSATION)

    def answer(self, answer: Json, asked: Asked) -> Json:
        choice = answer["choices"][0]
        message = choice["message"]
        content: list[Json] = []
        if message.get("reasoning_content"):
            thought = message["reasoning_content"]
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        content += [_tool_use(call) for call in message.get("tool_calls") or ()]
        prompt, completion, cached = reported(answer.get("usage"))
        stopped_by = choice.get("stop_reason")
        finish = choice.get("finish_reason") or "stop"
        reason = _REASONS.get(finish, "refusal" if finish == "content_filter" else "end_turn")
        if isinstance(stopped_by, str) and stopped_by in (
            asked.original.get("stop_sequences") or ()
        ):
            reason = "stop_sequence"
        return {
            "id": f"msg_{answer.get('id', '0')}",
            "type": "message",
            "role": "assistant",
            "model": answer.get("model") or asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stopped_by if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": prompt - cached,
                "output_tokens": completion,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
            },
        }

    def events(self, answer: Json, asked: Asked) -> Iterator[bytes]:
        del asked

        def send(kind: str, **more: Any) -> bytes:
            return event({"type": kind, **more}, kind)

        begin = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        begin["usage"] = {**answer["usage"], "output_tokens": 0}
        yield send("message_start", message=begin)
        for index, block in enumerate(answer["content"]):
            if block["type"] == "tool_use":
                empty, field, kind = {**block, "input": {}}, "partial_json", "input_json_delta"
                text = json.dumps(block["input"])
            else:
                field = kind = block["type"]
                empty, text, kind = {**block, field: ""}, block[field], f"{kind}_delta"
            yield send("content_block_start", index=index, content_block=empty)
            for piece in pieces(text):
                yield send("content_block_delta", index=index, delta={"type": kind, field: piece})
            yield send("content_block_stop", index=index)
        delta = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        yield send("message_delta", delta=delta, usage=answer["usage"])
        yield send("message_stop")

    def error(self, error: RefusedError) -> Json:
        kind = STATUS_NAMES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def error_event(self, error: RefusedError) -> bytes:
        return event(self.error(error), "error")


def _tool_use(call: Json) -> Json:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": _shown(function["arguments"]),
    }


def _shown(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # 1e400 is JSON, and what it becomes is none
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def _arguments(call_id: str, shown: Any, known: Mapping[str, str]) -> str:
    """Return arguments as the model wrote them: written anew, they may be other tokens."""
    own = known.get(call_id)
    if own is not None and _shown(own) == shown:
        return own
    if isinstance(shown, dict) and shown.keys() == {_UNPARSED}:
        return str(shown[_UNPARSED])
    return json.dumps(shown)


def _text(content: Any, where: str) -> str:
    """Return a text, or blocks of text, as one."""
    return "\n".join(texts(content, _TEXTS, where))


def _message(message: Json, where: str, known: Mapping[str, str]) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RefusedError(400, f"{where}: role {role!r} is not supported here")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = wanted(content, list, f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, where, known)]
    return _user(blocks, where)


def _assistant(blocks: list[Any], where: str, known: Mapping[str, str]) -> Json:
    said, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            said.append(wanted(block.get("text"), str, f"{where}.text"))
        elif kind == "thinking":
            thoughts.append(wanted(block.get("thinking"), str, f"{where}.thinking"))
        elif kind == "tool_use":
            call_id = wanted(block.get("id"), str, f"{where}.id")
            function = {
                "name": wanted(block.get("name"), str, f"{where}.name"),
                "arguments": _arguments(call_id, block.get("input"), known),
            }
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            raise RefusedError(400, f"{where}: a block of type {kind!r} is not supported here")
    found: Json = {"role": "assistant", "content": "".join(said) if said else None}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    return found | {"tool_calls": calls} if calls else found


def _user(blocks: list[Any], where: str) -> list[Json]:
    found: list[Json] = []
    parts: list[Json] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            text = _text(block.get("content") or "", f"{where}.tool_result")
            called = wanted(block.get("tool_use_id"), str, f"{where}.tool_use_id")
            found.append({"role": "tool", "tool_call_id": called, "content": text})
        elif kind == "text":
            parts.append({"type": "text", "text": wanted(block.get("text"), str, f"{where}.text")})
        elif kind == "image":
            parts.append(_image(block.get("source"), where))
        else:
            raise RefusedError(400, f"{where}: a block of type {kind!r} is not supported here")
    if parts and all(part["type"] == "text" for part in parts):
        return [*found, {"role": "user", "content": "\n".join(part["text"] for part in parts)}]
    return [*found, {"role": "user", "content": parts}] if parts else found


def _image(source: Any, where: str) -> Json:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif kind == "url":
        url = str(source.get("url"))
    else:
        raise RefusedError(400, f"{where}: an image from {kind!r} is not supported here")
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Any) -> Json:
    kind = wanted(tool, dict, "tools[]").get("type", "custom")
    if kind != "custom":
        raise RefusedError(400, f"tools: {kind!r} is the provider's own and not offered here")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Json:
    if choice is None:
        return {}
    kind = wanted(choice, dict, "tool_choice").get("type")
    names = {"auto": "auto", "any": "required", "none": "none"}
    if kind in names:
        found: Json = {"tool_choice": names[kind]}
    elif kind == "tool":
        found = {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    else:
        raise RefusedError(400, f"tool_choice {kind!r} is not supported here")
    return found | (
        {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    )
