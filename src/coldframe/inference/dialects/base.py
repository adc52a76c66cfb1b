"""What a provider's API has of its own: how it asks, answers, streams and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from coldframe.trajectories.calls import Declared

Json = dict[str, Any]

STATUS_NAMES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class RefusedError(Exception):
    """A request that is not answered; told to the client in its own dialect."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, wait_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.wait_s = status, code, wait_s


@dataclass(frozen=True)
class Asked:
    """A request, as chat completions have it."""

    body: Json
    """Without `model`, `stream` and what belongs to streaming."""
    model: str | None
    stream: bool
    original: Json
    parameters: Json = field(default_factory=dict)
    """Everything that was asked for but the conversation and its tools, in the client's words."""
    declared: Declared | None = None
    """What the conversation is, if whoever calls says it."""


def asked_of(body: Json, chat: Json, conversation: frozenset[str]) -> Asked:
    """Return a request, with everything beside its conversation as parameters.

    Args:
        chat: the request as chat completions have it.
        conversation: names of what is no parameter.
    """
    return Asked(
        body=chat,
        model=body.get("model"),
        stream=bool(body.get("stream")),
        original=body,
        parameters={name: value for name, value in body.items() if name not in conversation},
    )


class Dialect(Protocol):
    """One API. Keeps nothing between calls."""

    name: str
    keep_alive: bytes
    """Of a stream that waits: what every client passes over."""

    def ask(self, body: Json, arguments: Mapping[str, str]) -> Asked:
        """Read a request.

        Args:
            arguments: of earlier tool calls by id, as the model wrote them.
        Raises:
            RefusedError: it holds something that could not be passed on as it was meant.
        """

    def answer(self, answer: Json, asked: Asked) -> Json:
        """Return the engine's answer in this dialect."""

    def events(self, answer: Json, asked: Asked) -> Iterator[bytes]:
        """Return an answer of `answer` as the provider's own event stream, to its end."""

    def error(self, error: RefusedError) -> Json:
        """Return a refusal in this dialect."""

    def error_event(self, error: RefusedError) -> bytes:
        """Return a refusal in a stream that has begun."""


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def pieces(text: str, size: int = 256) -> Iterator[str]:
    """Cut a text as a stream would."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


def openai_error(error: RefusedError) -> Json:
    """Return a refusal as both of OpenAI's APIs have it."""
    kind = STATUS_NAMES.get(error.status, "server_error")
    return {
        "error": {"message": str(error), "type": kind, "param": None, "code": error.code or kind}
    }


def unknown_fields(body: Json, known: frozenset[str], where: str) -> None:
    """Refuse what nobody here knows: left out in silence it would change what was asked.

    Raises:
        RefusedError: there is such a field.
    """
    unknown = sorted(body.keys() - known)
    if unknown:
        raise RefusedError(400, f"{where}: {unknown[0]!r} is not supported here")


def wanted(value: Any, kind: type, what: str) -> Any:
    """Return a value of a kind.

    Raises:
        RefusedError: it is of another.
    """
    if not isinstance(value, kind):
        raise RefusedError(400, f"{what} is not of type {kind.__name__}")
    return value


def texts(content: Any, kinds: frozenset[str], where: str) -> list[str]:
    """Return a text, or the texts of blocks of these kinds.

    Raises:
        RefusedError: it is neither.
    """
    if isinstance(content, str):
        return [content]
    found = []
    for block in wanted(content, list, where):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise RefusedError(400, f"{where}: {kind!r} is not supported here, only text is")
        found.append(wanted(block.get("text"), str, f"{where}.text"))
    return found


def reported(usage: Any) -> tuple[int, int, int]:
    """Return tokens of prompt, completion and those of the prompt that were cached."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    numbers = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
    prompt, completion, kept = (one if type(one) is int else 0 for one in numbers)
    return prompt, completion, kept
