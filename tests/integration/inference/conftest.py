"""A proxy before a stand-in engine, both on real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coldframe.inference.app import ProxyApp
from coldframe.inference.engine import EngineSettings
from coldframe.inference.proxy import Proxy, ProxySettings
from coldframe.inference.server import serving
from coldframe.trajectories.calls import Budget, CapturedCalls, Level, read_calls
from tests.doubles.engine import Fault, StandInEngine, call, say

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI


def talk(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Call a tool with every odd answer of the model's, and say something with every even."""
    turn = sum(one["role"] == "assistant" for one in messages)
    if turn % 2 == 0:
        # Spaces that no writer of JSON leaves: whoever writes arguments anew changes them.
        return call(f'{{"command":  "echo hello {turn}"}}', call_id=f"call-{turn}", text="hello")
    return say(f"hello again, {turn}")


@dataclass
class Bench:
    """Everything that a test of the proxy takes in its hands."""

    engine: StandInEngine
    proxy: Proxy
    url: str
    directory: Path

    def mint(self, name: str = "a", **budget: Any) -> str:
        return self.proxy.mint(name, self.directory / f"{name}.jsonl", Budget(**budget))

    def calls(self, name: str = "a") -> CapturedCalls:
        return read_calls(self.directory / f"{name}.jsonl")

    def client(self, key: str, **options: Any) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20, **options)

    # The providers' clients take seconds to import, which each worker would pay in collecting.
    def openai(self, key: str) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key)

    def anthropic(self, key: str) -> AsyncAnthropic:
        from anthropic import AsyncAnthropic

        return AsyncAnthropic(base_url=self.url, api_key=key)

    def assert_is_the_engines_log(self, name: str = "a", *, but: int = 0) -> None:
        """Every turn is what the engine logged, id by id and bit by bit, and none is missing."""
        turns = self.calls(name).turns
        assert len(turns) == len(self.engine.log) - but
        for turn, logged in zip(turns, self.engine.log, strict=False):
            assert turn.prompt_token_ids == logged.prompt
            assert turn.call.completion_token_ids == logged.completion
            assert turn.call.logprobs is not None
            assert [*map(float.hex, turn.call.logprobs)] == [*map(float.hex, logged.logprobs)]


MakeBench = Callable[..., contextlib.AbstractAsyncContextManager[Bench]]


@pytest.fixture
def make_bench(tmp_path: Path) -> MakeBench:
    @contextlib.asynccontextmanager
    async def make(
        *faults: Fault | None,
        retries: int = 2,
        request_s: float = 5.0,
        keep_alive_s: float = 10.0,
        capture: Level = Level.TOKENS,
        api_key: str | None = None,
        **engine: Any,
    ) -> AsyncIterator[Bench]:
        chosen = {"script": talk, "faults": [*faults], **engine}
        async with StandInEngine(**chosen) as stand_in:
            settings = ProxySettings(
                EngineSettings(
                    stand_in.base_url,
                    api_key,
                    request_s=request_s,
                    retries=retries,
                    retry_wait_s=0.01,
                ),
                model="stand-in",
                capture=capture,
                policy_version="a" * 64,
                keep_alive_s=keep_alive_s,
            )
            async with Proxy(settings) as proxy:
                await proxy.check()
                async with serving(ProxyApp(proxy)) as url:
                    yield Bench(stand_in, proxy, url, tmp_path)

    return make


@pytest.fixture
async def bench(make_bench: MakeBench) -> AsyncIterator[Bench]:
    async with make_bench() as made:
        yield made
