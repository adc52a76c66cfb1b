"""The engine behind the proxy: asked without streaming, tried again in bounds, never believed."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

import aiohttp

from coldframe.protocol import strict_json
from coldframe.protocol.errors import InferenceError
from coldframe.trajectories.calls import MAX_DEPTH, Retry
from coldframe.trajectories.redaction import Redactor

MAX_ANSWER_BYTES = 256 << 20
MAX_WAIT_S = 30.0
MAX_RETRY_AFTER_S = 3600.0
"""The longest wait that an engine's Retry-After is taken to ask for."""
_COUNT_S = 10.0
_MOST_READ, _MOST_SAID = 4096, 500
"""Characters of an engine's own words about a failure: that are looked at, and that are told."""
RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class EngineFailedError(Exception):
    """No usable answer; what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        retry_after: float | None = None,
        retries: tuple[Retry, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after, self.retries = status, code, retry_after, retries


@dataclass(frozen=True)
class EngineSettings:
    """Where the engine is, and how patient one is with it."""

    base_url: str
    """Of its OpenAI-compatible API; `/chat/completions` is appended."""
    api_key: str | None = None
    request_s: float = 600.0
    """Seconds for one try."""
    retries: int = 4
    retry_wait_s: float = 0.5
    """Before the first further try; doubles each time, up to 30 s."""


@dataclass(frozen=True)
class Answered:
    """An answer that is one: an object with one choice that has a message."""

    body: dict[str, Any]
    retries: tuple[Retry, ...]


class Engine:
    """Connections to one engine; use it as an async context manager."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.base_url = settings.base_url.rstrip("/")
        # What an engine says of its key goes to a harness, and into the journal.
        self._redactor = Redactor([settings.api_key] if settings.api_key else ())

    async def __aenter__(self) -> Engine:
        headers = {"Content-Type": "application/json"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=30.0),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def ask(self, body: dict[str, Any], *, deadline_s: float = float("inf")) -> Answered:
        """Return the engine's answer. Cancelled: the engine sees its client leave.

        Args:
            deadline_s: for all tries together.
        Raises:
            EngineFailedError: there is none after all tries, or the engine refuses the request.
            TimeoutError: the deadline has passed.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        retries: list[Retry] = []
        async with asyncio.timeout(None if deadline_s == float("inf") else max(deadline_s, 0)):
            while True:
                try:
                    answer = await self._try(content)
                    return Answered(answer, tuple(retries))
                except EngineFailedError as failure:
                    failure.retries = tuple(retries)
                    again = failure.status in RETRIED_STATUS
                    if not again or len(retries) >= self.settings.retries:
                        raise
                    own = self.settings.retry_wait_s * 2.0 ** len(retries)
                    wait = min(max(own, failure.retry_after or 0.0), MAX_WAIT_S)
                    retries.append(Retry(reason=str(failure), status=failure.status, wait_s=wait))
                await asyncio.sleep(wait)

    async def _try(self, content: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.settings.request_s):
                url = f"{self.base_url}/chat/completions"
                status, headers, raw = await self.post(url, content)
        except aiohttp.ClientError as error:  # first, since some of them are TimeoutErrors too
            raise EngineFailedError(502, self._redactor.text(_said(error))) from error
        except TimeoutError:
            limit = self.settings.request_s
            raise EngineFailedError(504, f"no whole answer within {limit:g} s") from None
        if status != 200:
            raise _refusal(status, headers, raw, self._redactor)
        return _parse(raw)

    async def count(self, body: dict[str, Any]) -> int | None:
        """Return the engine's own count of a prompt's tokens; None if it gives none."""
        url = self.base_url.removesuffix("/v1") + "/tokenize"
        try:
            async with asyncio.timeout(_COUNT_S):
                status, _, raw = await self.post(url, json.dumps(body).encode())
            count = strict_json.parse(raw)["count"] if status == 200 else None
        except (
            aiohttp.ClientError,
            EngineFailedError,
            TimeoutError,
            ValueError,
            KeyError,
            TypeError,
        ):
            return None
        return count if type(count) is int else None

    async def post(self, url: str, content: bytes) -> tuple[int, Any, bytes]:
        """Send bytes; return status, headers and content.

        Raises:
            EngineFailedError: the answer is too large.
            aiohttp.ClientError: the connection failed.
        """
        async with self._http.post(url, data=content, allow_redirects=False) as response:
            raw = bytearray()
            async for piece in response.content.iter_any():
                raw += piece
                if len(raw) > MAX_ANSWER_BYTES:
                    raise EngineFailedError(500, f"the answer is over {MAX_ANSWER_BYTES} bytes")
            return response.status, response.headers, bytes(raw)

    async def probe(self, model: str, capture: dict[str, Any]) -> dict[str, Any]:
        """Make one call that is not recorded, in which only one token is possible each time.

        Its log-probabilities are 0 where the engine gives those of the distribution that it
        sampled from, and something else where it gives those before temperature and top-k.

        Raises:
            InferenceError: the engine does not answer.
        """
        ask = "Write one sentence about a thing that nobody expects."
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": ask}],
            "temperature": 1.0,
            "top_k": 1,
            "max_tokens": 8,
            **capture,
        }
        try:
            return (await self.ask(body, deadline_s=self.settings.request_s)).body
        except (EngineFailedError, TimeoutError) as error:
            raise InferenceError(f"the engine does not answer the probe: {error}") from error


def _said(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # its own text tells of its settings
        code, why = error.os_error.errno or 0, str(error.os_error)
        return (
            f"no connection to {error.host}:{error.port}: {os.strerror(code) if code > 0 else why}"
        )
    return f"{type(error).__name__}: {error}"


def _refusal(status: int, headers: Any, raw: bytes, redactor: Redactor) -> EngineFailedError:
    message, code = raw[:_MOST_READ].decode("utf-8", "replace"), None
    try:
        value = strict_json.parse(raw)
        error = value.get("error", value)
        message, code = str(error.get("message", message)), error.get("code")
    except (ValueError, AttributeError):
        pass  # a proxy in between speaks in pages
    asked = headers.get("Retry-After", "")
    wait = min(float(asked), MAX_RETRY_AFTER_S) if asked.isascii() and asked.isdigit() else None
    code = code[:_MOST_SAID] if isinstance(code, str) else None
    if not 400 <= status <= 599:
        status, message = 502, f"the engine answered with status {status}"
    # Cut afterwards: a key that is cut in two is known no more.
    said = redactor.text(message[:_MOST_READ])[:_MOST_SAID]
    return EngineFailedError(status, said, code=code, retry_after=wait)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        answer = strict_json.parse(raw, depth=MAX_DEPTH)
    except strict_json.NotStrictError as error:
        raise EngineFailedError(502, f"the engine's answer {error}") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineFailedError(502, "the engine's answer does not have one choice")
    message = choices[0].get("message")
    if not isinstance(message, dict) or _wrong_with(message):
        raise EngineFailedError(502, "the engine's answer has no message that is one")
    for value in (choices[0].get("finish_reason"), answer.get("model")):
        if value is not None and not is_text(value):
            raise EngineFailedError(502, "the engine's finish_reason or model is no text")
    found: dict[str, Any] = answer
    return found


def is_text(value: Any) -> bool:
    """Tell whether a value is a text that can be written down."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _wrong_with(message: dict[str, Any]) -> bool:
    """Tell whether a dialect could not put this message into its own words."""
    texts = (message.get("content"), message.get("reasoning_content"))
    calls = message.get("tool_calls") or []
    if not all(isinstance(one, str | None) for one in texts) or not isinstance(calls, list):
        return True
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id"), str):
            return True
        if not all(isinstance(function.get(name), str) for name in ("name", "arguments")):
            return True
    return False
