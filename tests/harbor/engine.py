"""A stand-in for an inference engine, on a loopback port: token ids and log-probabilities as vLLM
gives them, of a policy that samples tokens as no tokenizer would cut them.

What is wrong with an answer is told by the instruction: `scenario: NAME`.
"""

from __future__ import annotations

import json
import random
import re
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

ROLES = {"system": 4, "user": 5, "assistant": 6}
BEGIN, END = 2, 3
TURNS = (
    {"analysis": "begin", "plan": "look", "commands": [{"keystrokes": "ls\n", "duration": 0.1}]},
    {"analysis": "done", "plan": "stop", "commands": [], "task_complete": True},
    {"analysis": "sure", "plan": "stop", "commands": [], "task_complete": True},
)

WORK = "tmux -V > /tmp/made && echo hello >> /tmp/made"
TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 10 tokens",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
    }
}


class Engine:
    """Answers chat completions; `log` holds every call as it was sampled, by scenario."""

    def __init__(self) -> None:
        self.log: dict[str, list[tuple[list[int], list[int], list[float]]]] = {}
        self._refused = False
        self._sampled: dict[str, list[int]] = {}
        self._random = random.Random(0)
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answer = engine.answer(request)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body."""
        messages = request["messages"]
        if request.get("top_k") == 1:  # the probe of a proxy that starts
            return 200, self._body("probe", 0, "a", [BEGIN], [END], [0.0])
        text = "\n".join(str(one["content"]) for one in messages)
        found = re.search(r"scenario: ([a-z-]+)", text)
        scenario = found[1] if found else "summary"
        with self._lock:
            calls = self.log.setdefault(scenario, [])
            if scenario == "summarised" and len(calls) == 1 and not self._refused:
                self._refused = True
                return 400, TOO_LONG
            return 200, self._sample(scenario, messages, calls)

    def _sample(self, scenario: str, messages: list[Any], calls: list[Any]) -> dict[str, Any]:
        turn = sum(one["role"] == "assistant" for one in messages)
        number = len(calls)
        said: dict[str, Any] = dict(TURNS[min(turn, len(TURNS) - 1)])
        if scenario == "works" and turn == 0:
            said["commands"] = [{"keystrokes": f"{WORK}\n", "duration": 1.0}]
        content = json.dumps(said | {"n": f"{scenario} {number}"})
        pieces, place = [], 0
        while place < len(content):
            step = self._random.randint(1, 4)
            pieces.append(content[place : place + step])
            place += step
        ids = [1000 + zlib.crc32(piece.encode()) % 100_000 for piece in pieces] + [END]
        self._sampled[content] = ids
        logprobs = [-self._random.random() * 9 for _ in ids]
        prompt = self._render(messages)
        calls.append((prompt, ids, logprobs))
        return self._body(scenario, turn, content, list(prompt), list(ids), list(logprobs))

    def _render(self, messages: list[Any]) -> list[int]:
        ids = [1]
        for one in messages:
            text = str(one["content"])
            known = self._sampled.get(text) if one["role"] == "assistant" else None
            ids += [BEGIN, ROLES[one["role"]], *(known or [*map(ord, text), END])]
        return [*ids, BEGIN, ROLES["assistant"]]

    def _body(
        self, scenario: str, turn: int, content: str, prompt: Any, ids: Any, logprobs: Any
    ) -> dict[str, Any]:
        if scenario == "reordered" and turn == 2:
            prompt = list(self.log[scenario][1][0])  # the row of the turn before in its place
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if scenario == "rendered-anew" and turn == 1:
            prompt[-4:-4] = [7]
            del prompt[-1]
        if scenario == "off-by-one" and turn == 1:
            del logprobs[-1]
        if scenario == "not-a-number" and turn == 1:
            logprobs[0] = float("nan")
        if scenario == "bools" and turn == 1:
            ids[0] = True
        if scenario == "over-zero" and turn == 1:
            logprobs[0] = 1e-6
        if scenario == "completion-dropped" and turn == 1:
            ids = None
        if scenario in {"prompt-dropped", "here-and-there"} and turn == 1:
            prompt = None
        if scenario == "here-and-there" and turn == 2:
            ids = None
        body: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "demo",
            "usage": usage | {"total_tokens": sum(usage.values())},
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": content},
                    "logprobs": {
                        "content": [
                            {"token": "t", "logprob": one, "bytes": None, "top_logprobs": []}
                            for one in logprobs
                        ]
                    },
                }
            ],
        }
        if ids is not None:
            body["choices"][0]["token_ids"] = ids
        if prompt is not None:
            body["prompt_token_ids"] = prompt
        return body
