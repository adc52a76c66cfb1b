"""terminus-2 through a true Harbor job and our inference proxy, a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe.trajectories.calls import CapturedCalls, read_calls
from tests.harbor.engine import Engine
from tests.harbor.test_terminus import _run, engine

__all__ = ["engine"]

ROOT = Path(__file__).resolve().parents[2]


class Service:
    """The proxy as whoever administers it sees it."""

    def __init__(self, url: str, journals: Path) -> None:
        self.url, self.journals = url, journals

    def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, str]:
        key = (self.journals / "admin.key").read_text().strip()
        request = urllib.request.Request(
            f"{self.url.removesuffix('/v1')}/coldframe/{path}",
            method=method,
            data=json.dumps(body or {}).encode(),
            headers={"Authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: dict[str, str] = json.load(answer)
        return found

    def mint(self, name: str) -> str:
        return self.ask("POST", "attempts", {"attempt_id": name})["api_key"]

    def end(self, name: str) -> CapturedCalls:
        self.ask("DELETE", f"attempts/{name}")
        return read_calls(self.journals / f"{name}.jsonl")


@pytest.fixture
def service(engine: Engine, tmp_path: Path) -> Iterator[Service]:
    """Serve from the project's own environment: Harbor's has not all that a proxy needs."""
    journals = tmp_path / "journals"
    process = subprocess.Popen(
        [
            *(str(ROOT / ".venv" / "bin" / "python"), "-m", "coldframe.cli.main", "inference"),
            *("serve", "--upstream", engine.url, "--model", "demo", "--listen", "127.0.0.1:0"),
            *("--journals", str(journals), "--policy-version", "ab" * 32),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving "), line
        yield Service(line.split()[1].rstrip(","), journals)
    finally:
        process.terminate()
        process.wait(20)


def test_terminus_through_the_proxy_is_the_engines_log_in_both_records(
    engine: Engine, service: Service, tmp_path: Path
) -> None:
    """The proxy's journal and Harbor's rollout details say the same, bit for bit."""
    key = service.mint("a")
    done = _run(engine, tmp_path, ("proxied",), api_base=service.url, api_key=key)
    calls = service.end("a")

    (group,) = done.groups
    assert [str(one.error) for one in group.rejected] == []
    (rollout,) = group.rollouts
    log = [(tuple(p), tuple(c), [*map(float.hex, v)]) for p, c, v in engine.log["proxied"]]
    assert len(log) >= 2
    assert [
        (p, c, [*map(float.hex, v)])
        for p, c, v in zip(
            rollout.prompt_token_ids,
            rollout.completion_token_ids,
            rollout.old_logprobs,
            strict=True,
        )
    ] == log
    assert [
        (
            turn.prompt_token_ids,
            turn.call.completion_token_ids,
            [*map(float.hex, turn.call.logprobs or ())],
        )
        for turn in calls.turns
    ] == log
    assert calls.ended
    assert [*calls.segments()] == [0]


def test_context_that_terminus_summarised_is_segments_with_their_reasons(
    engine: Engine, service: Service, tmp_path: Path
) -> None:
    """Its sub-agents and what it goes on with are conversations of their own, none of them lost."""
    key = service.mint("a")
    done = _run(
        engine, tmp_path, ("summarised",), api_base=service.url, api_key=key, enable_summarize=True
    )
    calls = service.end("a")

    assert done.groups[0].rollouts == ()
    segments = calls.segments()
    assert len(segments) >= 3
    assert sum(map(len, segments.values())) == len(engine.log["summarised"])
    begun = [turns[0].call.broke for turns in segments.values()]
    assert begun[0] is None
    assert all(one is not None and "ids of segment" in one.reason for one in begun[1:])
