"""OpenAI's chat completions: what the engine speaks too."""

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
    wanted,
)

_STREAMING = frozenset({"stream", "stream_options", "model"})
_CONVERSATION = _STREAMING | {"messages", "tools"}
_NOT_THE_CALLERS = (
    *("lora_path", "session_params", "custom_logit_processor", "logits_processors"),
    *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
)
"""By these engines let others answer than the policy, go on from what no prompt shows, or run the
caller's code."""
_CAPTURED = ("prompt_token_ids", "prompt_logprobs", "kv_transfer_params")


class Chat:
    """See `Dialect`, whose protocol it keeps."""

    name = "chat"
    keep_alive = b": keep-alive\n\n"

    def ask(self, body: Json, arguments: Mapping[str, str]) -> Asked:
        del arguments
        messages = wanted(body.get("messages"), list, "messages")
        if not messages or not all(isinstance(one, dict) for one in messages):
            raise RefusedError(400, "messages is no list of objects with something in it")
        if body.get("n") not in (None, 1):
            raise RefusedError(400, "n: one answer per call; ask again for another")
        for name in _NOT_THE_CALLERS:
            if body.get(name) is not None:
                raise RefusedError(400, f"{name} is not for a caller to say")
        chat = {name: value for name, value in body.items() if name not in _STREAMING}
        return asked_of(body, chat, _CONVERSATION)

    def answer(self, answer: Json, asked: Asked) -> Json:
        """Return the answer without what only the record was to have."""
        choice = dict(answer["choices"][0])
        shown = {name: value for name, value in answer.items() if name not in _CAPTURED}
        if asked.original.get("return_token_ids"):
            shown["prompt_token_ids"] = answer.get("prompt_token_ids")
        else:
            choice.pop("token_ids", None)
        if not asked.original.get("logprobs"):
            choice["logprobs"] = None
        return {**shown, "object": "chat.completion", "choices": [{**choice, "index": 0}]}

    def events(self, answer: Json, asked: Asked) -> Iterator[bytes]:
        choice = answer["choices"][0]
        message = choice["message"]
        head: Json = {
            "id": answer.get("id", "chatcmpl-0"),
            "object": "chat.completion.chunk",
            "created": answer.get("created", 0),
            "model": answer.get("model"),
        }

        def chunk(delta: Json, finish: str | None = None, **more: Any) -> bytes:
            piece = {"index": 0, "delta": delta, "finish_reason": finish, **more}
            return event({**head, "choices": [piece]})

        yield chunk({"role": "assistant", "content": ""})
        for text in pieces(message.get("reasoning_content") or ""):
            yield chunk({"reasoning_content": text})
        # Log-probabilities belong to the whole answer, so they go with its first piece.
        more = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}
        for text in pieces(message.get("content") or ""):
            yield chunk({"content": text}, **more)
            more = {}
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            begin = {"name": function["name"], "arguments": ""}
            yield chunk(
                {
                    "tool_calls": [
                        {"index": index, "id": call["id"], "type": "function", "function": begin}
                    ]
                },
                **more,
            )
            more = {}
            for text in pieces(function["arguments"]):
                part = {"index": index, "function": {"arguments": text}}
                yield chunk({"tool_calls": [part]})
        yield chunk({}, choice.get("finish_reason"), **more)
        options = asked.original.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": answer.get("usage")})
        yield b"data: [DONE]\n\n"

    def error(self, error: RefusedError) -> Json:
        return openai_error(error)

    def error_event(self, error: RefusedError) -> bytes:
        return event(openai_error(error))
