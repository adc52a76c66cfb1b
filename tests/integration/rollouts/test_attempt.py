"""One attempt from image to trajectory, and whose failure it is when it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.harnesses.base import Limits, ModelSettings
from coldframe.host.wire import VERSION as SPAWNER_PROTOCOL
from coldframe.protocol.errors import Side
from coldframe.trajectories.schema import Termination
from coldframe.trajectories.steps import CallOutcome
from coldframe.trajectories.store import BlobStore
from tests.doubles.model_endpoint import Bash, Http, ModelEndpoint, Say
from tests.fixtures.waiting import until_asked
from tests.integration.rollouts.conftest import RunAttempt, all_begun
from tests.unit.rollouts.tasks import BASE, write_task

pytestmark = pytest.mark.root
REWARD = "/logs/verifier/reward.txt"
GRADED = f"#!/bin/sh\n[ -f /done ] && echo 1 > {REWARD} || echo 0 > {REWARD}\n"
SOLVED = "#!/bin/sh\necho $WORD; touch /done\n"


def make_task(root: Path, name: str = "one", toml: str = "", **files: str) -> Path:
    defaults = {"tests__test_sh": GRADED, "solution__solve_sh": SOLVED}
    return write_task(root, name, toml=BASE + toml, **(defaults | files))


async def test_attempt_by_the_oracle_passes_and_by_nop_fails(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The control: both end in a verdict, and the record holds what the design asks for."""
    directory = make_task(tmp_path, toml='[solution]\nenv = { WORD = "hi" }\n')
    solved = await run_attempt(directory, "oracle")
    idle = await run_attempt(directory, "nop")

    assert (solved.failure, idle.failure) == (None, None)
    assert (solved.rewards, idle.rewards) == ({"reward": 1.0}, {"reward": 0.0})
    assert solved.steps[0].calls[0].exit_code == 0
    identity, times = solved.identity, solved.times
    assert identity.image and identity.image.name == "debian:bookworm"
    assert identity.sandbox_id and identity.versions.runtime == "native"
    assert identity.versions.spawner_protocol == SPAWNER_PROTOCOL
    assert len(identity.versions.injected_binary_sha256 or "") == 64
    assert identity.initial_state and idle.identity.initial_state
    assert identity.initial_state.digest == idle.identity.initial_state.digest
    assert solved.file_diff and solved.file_diff.changed
    assert idle.file_diff and not idle.file_diff.changed
    assert min(times.create_s, times.exec_s, times.verify_s, times.delete_s) > 0
    assert times.total_s >= times.run_s - times.model_s


async def test_attempt_of_an_agent_sees_neither_tests_nor_solution(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """What an agent can read, it learns to read."""
    directory = make_task(tmp_path)
    look = "find / -xdev \\( -name test.sh -o -name solve.sh \\) 2> /dev/null; echo looked"
    with ModelEndpoint({"Do one": [Bash(look)]}) as endpoint:
        model = ModelSettings("policy", endpoint.base_url)
        trajectory = await run_attempt(directory, "react", model=model)

    shown = trajectory.steps[0].shown[0].shown.text
    assert BlobStore(tmp_path / "blobs").get(shown) == b"looked\n[exit code 0]"
    assert trajectory.rewards == {"reward": 0.0}


async def test_attempt_past_the_agents_deadline_is_still_verified_and_says_so(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Work done in time counts; the command in flight is dead before the tests arrive."""
    directory = make_task(
        tmp_path,
        toml="[agent]\ntimeout_sec = 0.7\n",
        solution__solve_sh="#!/bin/sh\ntouch /done; sleep 100\n",
        tests__test_sh=f"#!/bin/sh\npgrep -x sleep\n[ -f /done ] && echo 1 > {REWARD}\n",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.termination is Termination.AGENT_DEADLINE
    assert trajectory.rewards == {"reward": 1.0}
    assert trajectory.policy_failure and trajectory.policy_failure.code == "agent_deadline"
    assert [(one.name, one.survivors) for one in trajectory.phases] == [
        ("start", ()),
        ("agent", ()),
        ("verify", ()),
    ]


async def test_attempt_whose_endpoint_fails_has_no_reward(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """An overloaded model server booked as 0 would train the policy away from what it did."""
    with ModelEndpoint({"Do one": [Bash("touch /done"), Http(500)]}) as endpoint:
        model = ModelSettings("policy", endpoint.base_url, retries=1, retry_wait_s=0.01)
        trajectory = await run_attempt(make_task(tmp_path), "react", model=model)

    assert trajectory.rewards is None
    assert trajectory.failure and trajectory.failure.side is Side.INFERENCE
    assert trajectory.verification is None
    assert [len(step.calls) for step in trajectory.steps] == [1, 0]
    failed = trajectory.steps[-1]
    assert failed.model_attempts == 2
    assert failed.model_s > 0
    assert (failed.model_queue_s or 0) >= 0.01


async def test_attempt_that_babbles_is_judged_by_the_verifier(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The policy's own failure is the only one that may have a reward."""
    with ModelEndpoint(lambda messages: Say(None)) as endpoint:
        model = ModelSettings("policy", endpoint.base_url)
        trajectory = await run_attempt(make_task(tmp_path), "react", model=model)

    assert trajectory.termination is Termination.PARSE_FAILURES
    assert trajectory.rewards == {"reward": 0.0}
    assert trajectory.totals.parse_failures == 3


async def test_attempt_without_a_reward_file_is_the_verifiers_failure(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A crashed verifier trained as 0 is the field's best known fault."""
    trajectory = await run_attempt(make_task(tmp_path, tests__test_sh="#!/bin/sh\nexit 1\n"))

    assert trajectory.rewards is None
    assert trajectory.failure and trajectory.failure.code == "reward_missing"
    assert trajectory.failure.side is Side.VERIFIER
    assert trajectory.verification and trajectory.verification.exit_code == 1


async def test_attempt_on_an_image_that_is_not_there_is_the_callers_failure(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The message names the image; nothing was made."""
    toml = '[environment]\ndocker_image = "no/such:image"\n'
    trajectory = await run_attempt(write_task(tmp_path, toml=toml))

    assert trajectory.failure and trajectory.failure.side is Side.CALLER
    assert "no/such:image" in trajectory.failure.message
    assert trajectory.identity.sandbox_id is None


async def test_attempt_as_a_user_runs_the_agent_as_that_user_and_tests_as_root(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """[agent] user bounds the agent only; a non-root agent must not choose its grade."""
    trajectory = await run_attempt(
        make_task(
            tmp_path,
            toml='[agent]\nuser = "nobody"\n',
            solution__solve_sh="#!/bin/sh\nid -un > /tmp/who\n",
            tests__test_sh="#!/bin/sh\n"
            f'[ "$(cat /tmp/who) $(id -un)" = "nobody root" ] && echo 1 > {REWARD}\n',
        )
    )

    assert trajectory.rewards == {"reward": 1.0}


async def test_attempt_with_limits_gets_them(run_attempt: RunAttempt, tmp_path: Path) -> None:
    """cpus, memory_mb, env and workdir of the task are the sandbox's."""
    trajectory = await run_attempt(
        make_task(
            tmp_path,
            toml='cpus = 1\nmemory_mb = 64\nworkdir = "/srv"\nenv = { A = "b" }\n',
            solution__solve_sh="#!/bin/sh\n"
            '[ "$PWD $A" = "/srv b" ] || exit 1\n'
            "head -c 200000000 /dev/zero | tail -c 190000000 > /dev/null || touch /done\n",
        )
    )

    assert trajectory.rewards == {"reward": 1.0}


async def test_attempt_with_a_wall_limit_ends_by_the_smaller_of_both(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The caller may be stricter than the task, never more lenient."""
    directory = make_task(tmp_path, solution__solve_sh="#!/bin/sh\nsleep 100\n")
    trajectory = await run_attempt(directory, limits=Limits(wall_s=0.5))

    assert trajectory.termination is Termination.AGENT_DEADLINE
    assert trajectory.steps[0].calls[0].outcome in {CallOutcome.INTERRUPTED, CallOutcome.RESULT}
    assert trajectory.rewards == {"reward": 0.0}


async def test_attempt_whose_sandbox_is_deleted_is_the_environments_failure(
    run_attempt: RunAttempt, native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """A sandbox that vanished says nothing of the policy, and its command ends at once."""
    directory = make_task(tmp_path, solution__solve_sh="#!/bin/sh\ntouch /begun; sleep 1000\n")
    running = asyncio.create_task(run_attempt(directory))
    await until_asked(lambda: all_begun(native_async_client, 1))
    (sandbox,) = await native_async_client.list_sandboxes()
    await sandbox.delete()
    trajectory = await running

    assert trajectory.rewards is None
    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == (Side.ENVIRONMENT, "sandbox_gone")
    assert trajectory.steps[0].calls[0].reason == "sandbox_gone"


async def test_attempt_whose_survivors_starve_the_verifier_is_graded_without_them(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A 0 must not become a failure that is nobody's by leaving memory hogs behind."""
    hold = "python3 -c \"import time; x = b'x' * 12000000; print(flush=True); time.sleep(1000)\""
    hogs = (
        f"for i in $(seq 9); do {hold} > /tmp/$i 2>&1 & done\n"
        "for i in $(seq 9); do until [ -s /tmp/$i ]; do sleep 0.02; done; done"
    )
    needs = "python3 -c \"x = b'x' * 100000000\" || exit 1"
    files = {
        "solution__solve_sh": f"#!/bin/sh\n{hogs}\n",
        "tests__test_sh": f"#!/bin/sh\n{needs}\necho 0 > {REWARD}\n",
    }
    starved = await run_attempt(make_task(tmp_path, toml="memory_mb = 200\n", **files))
    control = await run_attempt(make_task(tmp_path, "two", toml="memory_mb = 1024\n", **files))

    assert starved.rewards == {"reward": 0.0}, starved.failure
    assert control.rewards == {"reward": 0.0}, control.failure
    assert starved.verification and control.verification
    assert (starved.verification.again, control.verification.again) == (True, False)
