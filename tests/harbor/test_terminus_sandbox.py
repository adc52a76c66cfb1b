"""terminus-2 in a sandbox of ours, typing into a true tmux, with its tokens captured."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe.integrations.harbor_rl import HarborRLAdapter, RLTask
from coldframe.integrations.harbor_trials import import_job, to_atif
from coldframe.trajectories.store import BlobStore
from tests.harbor.engine import Engine
from tests.harbor.jobs import IMPORT_PATH
from tests.harbor.test_rl import POLICY
from tests.harbor.test_trials import assert_harbor_takes
from tests.harbor.traps import Trap

DOCKERFILE = """\
FROM debian:bookworm
RUN apt-get update && apt-get install -y --no-install-recommends tmux
"""
TASK = Trap(
    solve="",
    test='grep -q "^tmux " /tmp/made && grep -q "^hello$" /tmp/made\n'
    "echo $((1 - $?)) > /logs/verifier/reward.txt",
    outcome=1.0,
    environment="build_timeout_sec = 600.0",
    files={
        "environment/Dockerfile": DOCKERFILE,
        "instruction.md": "Say hello in /tmp/made. scenario: works\n",
    },
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with Engine() as running:
        yield running


def test_terminus_works_in_a_sandbox_and_its_rollout_is_the_engines_log(
    engine: Engine, tmp_path: Path
) -> None:
    """From keystrokes in a terminal to a reward and tokens that may be trained on."""
    TASK.write(tmp_path / "tasks", "works")
    adapter = HarborRLAdapter(
        tmp_path / "jobs",
        "openai/demo",
        IMPORT_PATH,
        policy=POLICY,
        reward_schema="demo@1",
        api_base=engine.url,
        model_info={"max_input_tokens": 100_000, "max_output_tokens": 1000},
    )
    asked = [RLTask("works", "train", tmp_path / "tasks" / "works")]

    made = asyncio.run(adapter.generate(asked, run_id="r", attempts=1, concurrency=1))

    (group,) = made.groups
    assert [str(one.error) for one in group.rejected] == []
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0
    assert [
        (list(p), list(c), [*map(float.hex, v)])
        for p, c, v in zip(
            rollout.prompt_token_ids,
            rollout.completion_token_ids,
            rollout.old_logprobs,
            strict=True,
        )
    ] == [(p, c, [*map(float.hex, v)]) for p, c, v in engine.log["works"]]

    report = import_job(tmp_path / "jobs" / "train" / "r", tmp_path / "run")
    (one,) = report.attempts.values()
    assert one.rewards == {"reward": 1.0}
    assert_harbor_takes(to_atif(one, BlobStore(tmp_path / "run" / "blobs"), "x.0.0"), tmp_path)
