"""A stand-in for an inference engine, over real HTTP: it samples, keeps its own log, and may lie.

Its tokens are bytes and a few merges. It samples `hello` as `he` + `llo`, which no tokenizer
would give for that text: whoever tokenises an answer again gets other ids than it sampled.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

Message = dict[str, Any]
Script = Callable[[list[Message]], Message]
Answer = dict[str, Any]

MERGES = {"he": 256, "llo": 257, "hello": 258, "echo": 259, "command": 260}
ROLES = {"system": 300, "user": 301, "assistant": 302, "tool": 303}
END = 310


def tokenise(text: str) -> list[int]:
    """Return the one right way to write a text: the longest merge first, else its bytes."""
    ids: list[int] = []
    while text:
        merge = max((one for one in MERGES if text.startswith(one)), key=len, default=None)
        ids += [MERGES[merge]] if merge else [*text[0].encode()]
        text = text[len(merge or text[0]) :]
    return ids


def sample(text: str) -> list[int]:
    """Return another way to write it."""
    before, found, after = text.partition("hello")
    if not found:
        return tokenise(text)
    return [*tokenise(before), MERGES["he"], MERGES["llo"], *sample(after)]


def written(message: Message) -> str:
    """Return a message as the model would have written it."""
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    told = [f"<call>{one['name']} {one['arguments']}" for one in calls]
    return "".join([_text(message.get("content")), *told])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "[image]") for part in content)
    return content or ""


def say(text: str) -> Message:
    """The model answers in text."""
    return {"role": "assistant", "content": text}


def call(arguments: str, *, call_id: str, name: str = "bash", text: str | None = None) -> Message:
    """The model calls a tool."""
    function = {"name": name, "arguments": arguments}
    one = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [one]}


@dataclass(frozen=True)
class Logged:
    """One answer, as the engine knows it."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    body: dict[str, Any]


@dataclass(frozen=True)
class Lie:
    """The answer is changed before it is sent; the log is not."""

    change: Callable[[Answer], Any]


@dataclass(frozen=True)
class Status:
    """An error in the place of an answer."""

    status: int
    body: bytes = b'{"error": {"message": "scripted"}}'
    headers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raw:
    """Bytes in the place of an answer, and how long they are said to be."""

    body: bytes
    length: int | None = None


@dataclass(frozen=True)
class Stall:
    """Nothing comes, until the client leaves or so long has passed."""

    seconds: float = 30.0


Fault = Lie | Status | Raw | Stall


@dataclass
class StandInEngine:
    """Serves while it is entered.

    `faults` are used up one a request. With `remembers`, its template puts the ids of its own
    answers into later prompts; without, it tokenises their text again, as many templates do.
    """

    script: Script
    faults: list[Fault | None] = field(default_factory=list)
    remembers: bool = True
    processed: bool = True
    """Whether log-probabilities are those of the distribution that it samples from."""
    form: Literal["vllm", "sglang"] = "vllm"
    """Where the ids of the prompt stand: beside the choices, or in the choice."""
    delay_s: float = 0.0
    log: list[Logged] = field(default_factory=list, repr=False)
    requests: list[dict[str, Any]] = field(default_factory=list, repr=False)
    left: int = 0
    """Clients that left before they had their answer."""
    _known: dict[str, list[int]] = field(default_factory=dict, repr=False)
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._open: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in [*self._open]:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @property
    def base_url(self) -> str:
        """Of the API, to be followed by `/chat/completions`."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length: ")[2].partition("\r")[0] or 0)
        content = await reader.readexactly(length)
        if head.startswith("post /tokenize"):
            body = json.loads(content)
            _send(writer, 200, json.dumps({"count": len(self.render(body["messages"]))}).encode())
            return True
        if not head.startswith("post /v1/chat/completions "):
            _send(writer, 404, b"{}")
            return True
        body = json.loads(content)
        if body.get("top_k") == 1:  # the probe of a proxy that starts
            _send(writer, 200, json.dumps(self._probed(body)).encode())
            return True
        self.requests.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if await self._client_leaves(reader, self.delay_s):
            return False
        return await self._answer(body, fault, reader, writer)

    async def _client_leaves(self, reader: asyncio.StreamReader, seconds: float) -> bool:
        """Wait; True if the client closes its connection before that is over."""
        if seconds <= 0:
            return False
        try:
            async with asyncio.timeout(seconds):
                gone = not await reader.read(1)
        except TimeoutError:
            return False
        except ConnectionError:
            gone = True
        self.left += gone
        return True

    async def _answer(
        self,
        body: dict[str, Any],
        fault: Fault | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        match fault:
            case Status(status, content, headers):
                _send(writer, status, content, *headers)
            case Raw(content, said):
                _send(writer, 200, content, length=said)
                return said is None
            case Stall(seconds):
                return not await self._client_leaves(reader, seconds)
            case _:
                answer = self._sampled(body)
                if isinstance(fault, Lie):
                    changed = fault.change(answer)
                    answer = answer if changed is None else changed
                _send(writer, 200, json.dumps(answer).encode())
        await writer.drain()
        return True

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to where the model goes on."""
        ids: list[int] = []
        for one in messages:
            ids.append(ROLES[one["role"]])
            text = written(one)
            own = self._known.get(text) if one["role"] == "assistant" and self.remembers else None
            ids += [*tokenise(text), END] if own is None else own
        return [*ids, ROLES["assistant"]]

    def _sampled(self, body: dict[str, Any]) -> Answer:
        message = self.script(body["messages"])
        completion = [*sample(written(message)), END]
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        limit = body.get("max_tokens")
        if limit is not None and len(completion) > limit:
            completion, finish = completion[:limit], "length"
            message = {"role": "assistant", "content": (message["content"] or "")[:limit]}
        self._known[written(message)] = completion
        prompt = self.render(body["messages"])
        logprobs = [-self._random.expovariate(2.0) for _ in completion]
        self.log.append(Logged(tuple(prompt), tuple(completion), tuple(logprobs), body))
        return self._form(body, message, finish, prompt, completion, logprobs)

    def _form(
        self,
        body: dict[str, Any],
        message: Message,
        finish: str,
        prompt: list[int],
        completion: list[int],
        logprobs: list[float],
    ) -> Answer:
        choice: Answer = {"index": 0, "message": message, "finish_reason": finish}
        choice["logprobs"] = None
        counts = (len(prompt), len(completion))
        answer: Answer = {
            "id": f"chatcmpl-{len(self.log)}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": counts[0],
                "completion_tokens": counts[1],
                "total_tokens": sum(counts),
            },
        }
        if body.get("logprobs"):
            content = [
                {"token": f"t{one}", "logprob": value, "bytes": None, "top_logprobs": []}
                for one, value in zip(completion, logprobs, strict=True)
            ]
            choice["logprobs"] = {"content": content}
        if body.get("return_token_ids"):
            (answer if self.form == "vllm" else choice)["prompt_token_ids"] = prompt
            choice["token_ids"] = completion
        return answer

    def _probed(self, body: dict[str, Any]) -> Answer:
        """Answer a request in which only one token is possible at a time."""
        values = [0.0 if self.processed else -0.7] * 3
        prompt = self.render(body["messages"])
        return self._form(body, say("abc"), "length", prompt, [97, 98, 99], values)


def _send(
    writer: asyncio.StreamWriter,
    status: int,
    content: bytes,
    *headers: str,
    length: int | None = None,
) -> None:
    lines = [
        f"HTTP/1.1 {status} X",
        "Content-Type: application/json",
        f"Content-Length: {len(content) if length is None else length}",
        *headers,
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
