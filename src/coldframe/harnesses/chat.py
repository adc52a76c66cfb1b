"""Ask an OpenAI-compatible chat endpoint, and say of every failure that it is the endpoint's.

Bounded everywhere: tries, waits, answer size. A failure here is never the policy's, with one
exception that the API itself names: the conversation no longer fits its context.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from coldframe.harnesses.base import Ending, ModelSettings
from coldframe.protocol.errors import InferenceError
from coldframe.trajectories.redaction import redact_url
from coldframe.trajectories.schema import Termination
from coldframe.trajectories.steps import Usage

MAX_ANSWER_BYTES = 32 << 20
MAX_WAIT_S = 30.0
RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
CONTEXT_CODES = frozenset({"context_length_exceeded"})


@dataclass(frozen=True)
class Answer:
    """One answer of the endpoint, checked down to its message."""

    raw: bytes
    message: dict[str, Any]
    finish_reason: str | None
    usage: Usage
    model: str | None


@dataclass
class Spent:
    """What asking has taken so far, also when it fails or is cancelled."""

    attempts: int = 0
    model_s: float = 0.0
    """Of all requests, those that failed too."""
    wait_s: float = 0.0
    """Waited between tries."""


class _Failed(Exception):
    def __init__(self, message: str, *, again: bool, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.again, self.wait_s = again, wait_s


class ChatClient:
    """A connection to one endpoint; use it as an async context manager."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._url = settings.base_url.rstrip("/") + "/chat/completions"
        # The environment's proxies are the operator's for other traffic; the endpoint is named.
        self._http = httpx.AsyncClient(
            headers=headers,
            trust_env=False,
            timeout=httpx.Timeout(settings.request_s, connect=min(settings.request_s, 30.0)),
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def ask(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        spent: Spent | None = None,
    ) -> Answer:
        """Send the conversation and return the answer; what that takes is added to `spent`.

        Raises:
            InferenceError: no usable answer after all tries; the message says what came last.
            Ending: the conversation no longer fits the model's context.
        """
        body: dict[str, Any] = {"model": self.settings.name, "messages": messages, "tools": tools}
        body |= self.settings.sampling()
        if seed is not None:
            body["seed"] = seed
        if max_tokens is not None:
            body["max_tokens"] = min(max_tokens, body.get("max_tokens", max_tokens))
        spent = spent or Spent()
        for attempt in range(1, self.settings.retries + 2):
            spent.attempts = attempt
            try:
                begun = time.monotonic()
                try:
                    raw = await self._post(body)
                finally:
                    spent.model_s += time.monotonic() - begun
                return Answer(raw, *_parse(raw))
            except _Failed as failure:
                if not failure.again or attempt > self.settings.retries:
                    raise InferenceError(
                        f"model endpoint {redact_url(self._url)}: {failure} (try {attempt})"
                    ) from failure
                begun = time.monotonic()
                try:
                    await asyncio.sleep(self._wait(attempt, failure.wait_s))
                finally:
                    spent.wait_s += time.monotonic() - begun
        raise AssertionError("the last try returns or raises")

    def _wait(self, attempt: int, asked: float | None) -> float:
        own: float = self.settings.retry_wait_s * 2.0 ** (attempt - 1)
        return min(max(own, asked or 0.0), MAX_WAIT_S)

    async def _post(self, body: dict[str, Any]) -> bytes:
        try:
            # One clock over the whole answer: httpx's own limits are per read, and an endpoint
            # that sends a byte now and then would hold the episode for ever.
            async with (
                asyncio.timeout(self.settings.request_s),
                self._http.stream("POST", self._url, json=body) as response,
            ):
                content = await _read_bounded(response)
                if response.status_code == 200:
                    return content
                raise _refusal(response, content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kind = type(error).__name__
            again = not isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL)
            raise _Failed(f"{kind}: {error}".rstrip(": "), again=again) from error
        except TimeoutError:
            limit = self.settings.request_s
            raise _Failed(f"no whole answer within {limit:g} s", again=True) from None


async def _read_bounded(response: httpx.Response) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise _Failed(f"the answer is over {MAX_ANSWER_BYTES} bytes", again=False)
    return bytes(content)


def _refusal(response: httpx.Response, content: bytes) -> Exception:
    """Return what to raise for a status other than 200."""
    code = detail = None
    try:
        error = _load(content)["error"]
        code, detail = error.get("code"), error.get("message")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        detail = content[:200].decode("utf-8", "replace")
    if response.status_code in {400, 413} and code in CONTEXT_CODES:
        return Ending(Termination.CONTEXT_LIMIT, str(detail)[:500])
    status = response.status_code
    asked = response.headers.get("retry-after", "")
    wait = float(asked) if asked.isascii() and asked.isdigit() else None
    text = f"status {status}: {str(detail)[:500]}"
    return _Failed(text, again=status in RETRIED_STATUS, wait_s=wait)


def _parse(raw: bytes) -> tuple[dict[str, Any], str | None, Usage, str | None]:
    """Return message, finish reason, usage and model name; nonsense is the endpoint's failure."""
    try:
        answer = _load(raw)
    except (ValueError, RecursionError):
        raise _Failed("the answer is not JSON", again=True) from None
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (KeyError, IndexError, TypeError):
        raise _Failed("the answer has no choices[0].message", again=True) from None
    if not isinstance(message, dict):
        raise _Failed("choices[0].message is not an object", again=True)
    finish, model = choice.get("finish_reason"), answer.get("model")
    return (
        message,
        finish if isinstance(finish, str) else None,
        _usage(answer.get("usage")),
        model if isinstance(model, str) else None,
    )


def _load(raw: bytes) -> Any:
    """Read JSON; a half of a surrogate pair, which no text can hold, becomes a question mark.

    Models write them where an answer is cut inside of a character.
    """
    value = json.loads(raw)
    if b"\\ud" not in raw.lower():
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _usage(value: Any) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=_count(value.get("prompt_tokens")),
        completion_tokens=_count(value.get("completion_tokens")),
        total_tokens=_count(value.get("total_tokens")),
        cached_tokens=_count(cached),
    )


def _count(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and value >= 0 else None
