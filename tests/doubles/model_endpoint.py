"""A scripted policy behind the real chat-completions HTTP API, on a loopback port.

A script maps a word of the instruction to the replies of its turns. Which turn it is follows
from the conversation alone (the assistant's messages in it), so that any number of episodes may
talk to one endpoint at a time. What a request was is kept for the test to look at.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Message = dict[str, Any]


@dataclass(frozen=True)
class Bash:
    """The model calls the bash tool, once per command."""

    commands: tuple[str, ...]

    def __init__(self, *commands: str) -> None:
        object.__setattr__(self, "commands", commands)


@dataclass(frozen=True)
class Say:
    """The model answers in text."""

    text: str | None
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Calls:
    """The model gives these tool calls, whatever they are."""

    tool_calls: Any


@dataclass(frozen=True)
class Http:
    """The endpoint answers with a status and a body of its own."""

    status: int
    body: bytes = b'{"error": {"message": "scripted failure"}}'
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class HangUp:
    """The endpoint closes the connection in the middle of an answer."""


@dataclass(frozen=True)
class Stall:
    """The endpoint sends its headers and a byte, then nothing until the test ends."""


@dataclass(frozen=True)
class Once:
    """`first` for so many requests of this turn, then `then`: a fault that passes."""

    first: Reply
    then: Reply
    times: int = 1


Reply = Bash | Say | Calls | Http | HangUp | Stall | Once
Script = Mapping[str, Sequence[Reply]] | Callable[[list[Message]], Reply]


def tool_call(arguments: Any, *, name: str = "bash", call_id: str = "call-0") -> Message:
    """Return one tool call; arguments that are not text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


@dataclass
class ModelEndpoint:
    """Serves while it is entered; `base_url` is what a client is given."""

    script: Script
    usage: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._tries: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def base_url(self) -> str:
        """Of the API, to be followed by `/chat/completions`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def wait_released(self) -> None:
        """Return when the test is over."""
        self._released.wait()

    def reply(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        """Return the scripted reply to a request."""
        messages: list[Message] = body["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        instruction = next(one["content"] for one in messages if one["role"] == "user")
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self._tries[instruction, turn] += 1
            tried = self._tries[instruction, turn]
        reply = self._scripted(messages, instruction, turn)
        if isinstance(reply, Once):
            return reply.first if tried <= reply.times else reply.then
        return reply

    def _scripted(self, messages: list[Message], instruction: str, turn: int) -> Reply:
        if callable(self.script):
            return self.script(messages)
        found = [replies for word, replies in self.script.items() if word in instruction]
        if len(found) != 1:
            return Http(404, b'{"error": {"message": "no script for this instruction"}}')
        replies = found[0]
        return replies[turn] if turn < len(replies) else Say("There is nothing left to do.")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    endpoint: ModelEndpoint


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, b'{"error": {"message": "no such path"}}')
            return
        reply = self.server.endpoint.reply(body, dict(self.headers.items()))
        match reply:
            case Http(status, content, headers):
                self._send(status, content, headers)
            case HangUp():
                self._begin(1000)
                self.wfile.write(b'{"choices"')
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case Stall():
                self._begin(1000)
                self.wfile.write(b"{")
                self.wfile.flush()
                self.server.endpoint.wait_released()
                self.close_connection = True
            case _:
                answer = _answer(body, reply, usage=self.server.endpoint.usage)
                self._send(200, json.dumps(answer).encode())

    def _begin(
        self, length: int, status: int = 200, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, content: bytes, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._begin(len(content), status, headers)
        self.wfile.write(content)


def _answer(body: dict[str, Any], reply: Reply, *, usage: bool) -> dict[str, Any]:
    message, finish = _message(reply, len(body["messages"]))
    answer: dict[str, Any] = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "model": f"{body['model']}-scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }
    if usage:
        prompt = sum(len(json.dumps(one)) for one in body["messages"]) // 4
        made = max(len(json.dumps(message)) // 4, 1)
        answer["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }
    return answer


def _message(reply: Reply, position: int) -> tuple[Message, str]:
    match reply:
        case Bash(commands):
            calls = [
                tool_call({"command": one}, call_id=f"call-{position}-{number}")
                for number, one in enumerate(commands)
            ]
            return {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
        case Calls(tool_calls):
            return {"role": "assistant", "content": "", "tool_calls": tool_calls}, "tool_calls"
        case Say(text, finish_reason):
            return {"role": "assistant", "content": text}, finish_reason
        case _:
            raise TypeError(f"{reply!r} is no message")
