"""`coldframe inference serve` as a user runs it: a process, an administrator's key, kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coldframe.trajectories.calls import read_calls
from tests.doubles.engine import StandInEngine
from tests.integration.inference.conftest import talk

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "say hello"}]}


@contextlib.asynccontextmanager
async def served(engine: str, journals: Path, *options: str) -> AsyncIterator[tuple[Any, str]]:
    """Start it, and give the process and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coldframe.cli.main", "inference", "serve", "--upstream", engine,
        "--model", "stand-in", "--journals", str(journals), "--listen", "127.0.0.1:0", *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("serving "), (await process.stderr.read()).decode()
        yield process, line.split()[1].removesuffix("/v1,")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def administrator(url: str, journals: Path) -> httpx.AsyncClient:
    key = (journals / "admin.key").read_text().strip()
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20)


async def test_service_mints_carries_pauses_and_survives_kill_9(tmp_path: Path) -> None:
    """The whole life of an attempt, over a proxy that is killed in its midst."""
    journals = tmp_path / "journals"
    async with StandInEngine(talk) as engine:
        async with served(engine.base_url, journals) as (process, url):
            assert (journals / "admin.key").stat().st_mode & 0o777 == 0o600
            async with administrator(url, journals) as admin:
                minted = await admin.post("/coldframe/attempts", json={"attempt_id": "a"})
                key = minted.json()["api_key"]
                taken = await admin.post("/coldframe/attempts", json={"attempt_id": "a"})
                odd = await admin.post("/coldframe/attempts", json={"attempt_id": "../a"})
                unknown = await admin.post("/coldframe/attempts", json={"attempt_id": "b", "x": 1})
                assert (minted.status_code, taken.status_code) == (201, 400)
                assert (odd.status_code, unknown.status_code) == (400, 400)
                paused = await admin.post("/coldframe/pause", json={"retry_after_s": 3})
                assert paused.json() == {"paused": True, "policy_version": None}
                async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client:
                    assert (await client.post(CHAT, json=ASK)).headers["retry-after"] == "3"
                    await admin.post("/coldframe/resume", json={"policy_version": "d" * 64})
                    first = await client.post(CHAT, json=ASK)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with served(engine.base_url, journals) as (_, url):
            messages = [*ASK["messages"], first.json()["choices"][0]["message"]]
            messages.append({"role": "tool", "tool_call_id": "call-0", "content": "hello"})
            async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client:
                await client.post(CHAT, json={"messages": messages})
            async with administrator(url, journals) as admin:
                raw = await admin.get("/coldframe/attempts/a/calls")
                assert (await admin.delete("/coldframe/attempts/a")).status_code == 200
                assert (await admin.delete("/coldframe/attempts/a")).status_code == 400
                assert (await admin.get("/coldframe/attempts/..%2fadmin.key/calls")).is_error

    captured = read_calls(journals / "a.jsonl")
    assert (journals / "a.jsonl").read_bytes().startswith(raw.content)
    assert [one.call.policy_version for one in captured.turns] == ["d" * 64, "d" * 64]
    assert [one.prompt_token_ids for one in captured.turns] == [one.prompt for one in engine.log]
    assert (captured.ended, [*captured.segments()]) == (True, [0])


async def test_pause_and_weights_survive_kill_9_until_others_are_named(tmp_path: Path) -> None:
    """Calls of the newest weights were booked under those of the first start, whatever came since;
    and a proxy that was killed while weights were changed answered in their midst."""
    first = ("--policy-version", "a" * 64)
    async with StandInEngine(talk) as engine:
        for begun, retry_after_s in ((first, 7), (first, None)):
            async with served(engine.base_url, tmp_path, *begun) as (process, url):
                async with administrator(url, tmp_path) as admin:
                    if retry_after_s is not None:
                        await admin.post("/coldframe/resume", json={"policy_version": "b" * 64})
                        await admin.post("/coldframe/pause", json={"retry_after_s": retry_after_s})
                    else:
                        found = (await admin.post("/coldframe/pause", json={})).json()
                        assert await process.stdout.readline() == b"paused, as before\n"
                process.send_signal(signal.SIGKILL)
                await process.wait()
        assert found == {"paused": True, "policy_version": "b" * 64}
        other = ("--policy-version", "c" * 64)
        async with served(engine.base_url, tmp_path, *other) as (_, url):
            async with administrator(url, tmp_path) as admin:
                resumed = await admin.post("/coldframe/resume", json={})
            assert resumed.json() == {"paused": False, "policy_version": "c" * 64}


async def test_admin_key_that_was_begun_and_not_written_is_made(tmp_path: Path) -> None:
    """A process was killed between the two; an empty key would be anybody's."""
    (tmp_path / "admin.key").touch()
    async with (
        StandInEngine(talk) as engine,
        served(engine.base_url, tmp_path) as (_, url),
        administrator(url, tmp_path) as admin,
    ):
        assert (await admin.post("/coldframe/pause", json={})).status_code == 200
        forever = await admin.post("/coldframe/pause", content='{"retry_after_s": 1e999}')
        assert forever.status_code == 400
    assert len((tmp_path / "admin.key").read_text().strip()) > 40


async def test_two_proxies_never_write_into_one_directory_of_journals(tmp_path: Path) -> None:
    """Each would go on with the other's attempts, and their tokens would stand mixed."""
    async with StandInEngine(talk) as engine:
        async with served(engine.base_url, tmp_path) as (first, _):
            with pytest.raises(AssertionError, match="another proxy writes there"):
                async with served(engine.base_url, tmp_path):
                    pass
            assert first.returncode is None
        async with served(engine.base_url, tmp_path):
            pass


async def test_service_says_where_it_serves_and_no_more(tmp_path: Path) -> None:
    """Lines about nothing hide the one about a call without its tokens."""
    async with StandInEngine(talk) as engine, served(engine.base_url, tmp_path) as (process, url):
        assert (await asyncio.to_thread(httpx.get, f"{url}/health")).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
    assert said in (b"", None)


async def test_weights_are_named_by_their_digest_or_not_at_all(tmp_path: Path) -> None:
    """At the start and at every change: after hours it would be too late."""
    async with StandInEngine(talk) as engine:
        with pytest.raises(AssertionError, match="'latest' is no digest"):
            async with served(engine.base_url, tmp_path, "--policy-version", "latest"):
                pass
        async with served(engine.base_url, tmp_path) as (_, url):
            async with administrator(url, tmp_path) as admin:
                odd = await admin.post("/coldframe/resume", json={"policy_version": "step-12"})
            assert odd.status_code == 400
            assert "is no digest" in odd.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_administration_is_for_the_administrator_alone(tmp_path: Path, method: str) -> None:
    """A harness that could mint keys could speak for other attempts."""
    async with StandInEngine(talk) as engine, served(engine.base_url, tmp_path) as (_, url):
        async with administrator(url, tmp_path) as admin:
            minted = await admin.post("/coldframe/attempts", json={"attempt_id": "a"})
        for key in ("x", minted.json()["api_key"]):
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                for path in ("attempts", "attempts/a", "attempts/a/calls", "pause", "resume"):
                    answer = await client.request(method, f"/coldframe/{path}")
                    assert answer.status_code == 401


async def test_service_says_what_its_engine_lacks_and_ends(tmp_path: Path) -> None:
    """Before anybody has run a task for nothing."""
    async with StandInEngine(talk, processed=False) as engine:
        with pytest.raises(AssertionError, match="--logprobs-mode processed_logprobs"):
            async with served(engine.base_url, tmp_path):
                pass
        async with served(engine.base_url, tmp_path, "--capture", "text") as (_, url):
            health = await asyncio.to_thread(httpx.get, f"{url}/health")
        assert health.json()["capture"] == "text"
