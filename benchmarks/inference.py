"""What the proxy adds to a call, and how many it carries, on one machine with engine and clients.

python -m benchmarks.inference --json [--quick]

The engine answers at once, so that what is measured is the proxy: its own share of a call, with
ids and log-probabilities checked and written down. Engine and proxy are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._measure import percentile, report
from coldframe.inference.app import ProxyApp
from coldframe.inference.engine import EngineSettings
from coldframe.inference.proxy import Proxy, ProxySettings
from coldframe.inference.server import serving

PROMPT_TOKENS, COMPLETION_TOKENS, TURNS = 2_000, 100, 20
"""Of a usual agent: its first prompt, each answer and what it then sees, and how often."""
_IN_FLIGHT = 16


def _answer(turn: int) -> bytes:
    """Return what an engine says in a turn of a conversation."""
    prompt = PROMPT_TOKENS + turn * 2 * COMPLETION_TOKENS
    ids = [*range(PROMPT_TOKENS)]
    for _ in range(turn):
        ids += [*range(1000, 1000 + COMPLETION_TOKENS), *range(COMPLETION_TOKENS)]
    completion = [*range(1000, 1000 + COMPLETION_TOKENS)]
    content = [
        {"token": f"tok{one}", "logprob": -1 / one, "bytes": None, "top_logprobs": []}
        for one in completion
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * COMPLETION_TOKENS},
        "finish_reason": "stop",
        "token_ids": completion,
        "logprobs": {"content": content},
    }
    counts = {"prompt_tokens": prompt, "completion_tokens": COMPLETION_TOKENS}
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": {**counts, "total_tokens": sum(counts.values())},
        "prompt_token_ids": ids,
    }
    return json.dumps(answer).encode()


async def _engine(ready: Connection) -> None:
    answers = []
    for body in map(_answer, range(TURNS)):
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        answers.append(f"{head}\r\n\r\n".encode() + body)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = _length(await reader.readuntil(b"\r\n\r\n"))
                content = await reader.readexactly(length)
                turn = int(content.partition(b'"seed":')[2].lstrip().partition(b",")[0])
                writer.write(answers[turn])
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _proxy(ready: Connection, engine: int, attempts: int) -> None:
    settings = ProxySettings(EngineSettings(f"http://127.0.0.1:{engine}/v1"), "m")
    with tempfile.TemporaryDirectory(prefix="coldframe-") as directory:
        async with Proxy(settings) as proxy:
            names = [f"attempt-{one}" for one in range(attempts)]
            keys = [proxy.mint(one, Path(directory) / f"{one}.jsonl") for one in names]
            async with serving(ProxyApp(proxy)) as url:
                ready.send((int(url.rpartition(":")[2]), keys))
                await asyncio.Event().wait()


def _run(what: Any, *arguments: Any) -> None:
    asyncio.run(what(*arguments))


@contextlib.contextmanager
def _process(what: Any, *arguments: Any) -> Iterator[Any]:
    """Run a coroutine in a process of its own, and give the first thing that it sends."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run, args=(what, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])


class _Client:
    """One connection; costs as little as it can, since it shares the machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def call(self, key: str, turn: int) -> float:
        """Ask once, and return the seconds until the whole answer was there."""
        words = PROMPT_TOKENS + turn * 2 * COMPLETION_TOKENS
        message = {"role": "user", "content": "word " * words}
        body = json.dumps({"seed": turn, "messages": [message], "model": "m"}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}"
        request = f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        begun = time.perf_counter()
        self._writer.write(request)
        said = await self._reader.readuntil(b"\r\n\r\n")
        await self._reader.readexactly(_length(said))
        if not said.startswith(b"HTTP/1.1 200"):
            raise AssertionError(said)
        return time.perf_counter() - begun

    async def __aenter__(self) -> _Client:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=1 << 20
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._writer.close()


async def _added(engine: int, proxy: int, keys: list[str]) -> dict[str, object]:
    """Ask the engine and the proxy in turn, one conversation after another."""
    async with _Client(engine) as direct, _Client(proxy) as through:
        pairs = [
            (await direct.call(key, turn), await through.call(key, turn))
            for key in keys
            for turn in range(TURNS)
        ]
    columns = [*zip(*pairs[TURNS:], strict=True)]  # the first conversation warms both
    p50 = [percentile(column, 0.5) * 1e3 for column in columns]
    p99 = [percentile(column, 0.99) * 1e3 for column in columns]
    return {
        "direct_ms": round(p50[0], 3),
        "through_ms": round(p50[1], 3),
        "added_ms": round(p50[1] - p50[0], 3),
        "added_ms_p99": round(p99[1] - p99[0], 3),
    }


async def _rate(port: int, keys: list[str]) -> float:
    """Return calls a second of as many conversations at once as are to be in flight."""
    left = iter(keys)

    async def work() -> None:
        async with _Client(port) as client:
            for key in left:
                for turn in range(TURNS):
                    await client.call(key, turn)

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
    return len(keys) * TURNS / (time.perf_counter() - begun)


async def measure(quick: bool) -> dict[str, object]:
    """Return everything that is promised of the proxy."""
    count = 11 if quick else 51
    with (
        _process(_engine) as engine,
        _process(_proxy, engine, count + 2 * _IN_FLIGHT) as (proxy, keys),
    ):
        result = await _added(engine, proxy, keys[:count])
        rate = await _rate(proxy, keys[count:])
        return {**result, "requests_per_s": round(rate, 1), "in_flight": _IN_FLIGHT}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.quick))
    report(result, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
