"""Grading in a sandbox that the agent has never seen."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.rollouts import carry
from coldframe.rollouts.attempt import Attempt
from coldframe.rollouts.attempt_settings import AttemptSettings
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import load_task
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import BlobStore
from coldframe.trajectories.verification import Artifacts
from tests.integration.rollouts.conftest import RunAttempt
from tests.unit.rollouts.tasks import BASE, write_task

pytestmark = pytest.mark.root
REWARD = "/logs/verifier/reward.txt"


def separate_task(root: Path, solve: str, test: str, artifacts: str = '["/srv/out"]') -> Path:
    toml = f"artifacts = {artifacts}\n" + BASE + '[verifier]\nenvironment_mode = "separate"\n'
    return write_task(
        root,
        toml=toml,
        solution__solve_sh=f"#!/bin/sh\n{solve}\n",
        tests__test_sh=f"#!/bin/sh\n{test}\n",
    )


def travelled(trajectory: Trajectory) -> Artifacts:
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.verification and trajectory.verification.artifacts
    return trajectory.verification.artifacts


async def test_separate_verifier_gets_what_is_declared_and_nothing_else(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The agent may replace every program of its own sandbox: it is not the verifier's."""
    directory = separate_task(
        tmp_path,
        "mkdir -p /srv/out/deep; echo work > /srv/out/deep/a; echo no > /srv/undeclared; "
        "printf '#!/bin/true\\n' > /usr/bin/grep; rm /usr/bin/cmp",
        "test ! -e /srv/undeclared && command -v cmp && grep -qx work /srv/out/deep/a "
        f"&& test ! -e /solution && echo 1 > {REWARD}",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}
    found = travelled(trajectory)
    assert [(one.path, one.kind, one.size) for one in found.entries] == [
        ("/srv/out/deep", "directory", 0),
        ("/srv/out/deep/a", "file", 5),
    ]
    assert found.entries[1].sha256 is not None
    assert found.refused == ()
    agent, verify = trajectory.phases[-2:]
    assert (agent.name, verify.name) == ("agent", "verify")
    assert agent.sandbox_id != verify.sandbox_id
    assert trajectory.identity.verifier.name == "separate"


async def test_separate_verifier_is_sent_no_fifo_device_or_link_that_leads_out(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """What is refused is told, and the verifier judges without it."""
    directory = separate_task(
        tmp_path,
        "mkdir -p /srv/out /srv/x; cd /srv/out; echo ok > good; ln -s good inside; ln good hard; "
        "ln -s /etc/shadow absolute; ln -s ../../etc/shadow up; mkfifo fifo; "
        "mkfifo /srv/fifo; ln -s /srv/x /srv/link",
        f"cd /srv/out && ls > {REWARD}.names && cat {REWARD}.names && "
        "test $(cat inside)$(cat hard) = okok && test good -ef hard && "
        "test $(ls | wc -l) = 3 && test ! -e /srv/fifo && test ! -e /srv/link "
        f"&& echo 1 > {REWARD}",
        '["/srv/out", "/srv/fifo", "/srv/link", "/srv/absent", "/srv/x"]',
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}
    refused = {one.path: one.reason for one in travelled(trajectory).refused}
    assert set(refused) == {
        "/srv/out/absolute",
        "/srv/out/up",
        "/srv/fifo",
        "/srv/link",
        "/srv/absent",
    }
    assert "fifo" in refused["/srv/fifo"]
    assert "outside" in refused["/srv/out/up"]


async def test_separate_artifacts_leave_out_what_is_excluded_and_stay_sparse(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A caller must not pay for caches, nor for holes."""
    directory = separate_task(
        tmp_path,
        "mkdir -p /srv/out/cache/x; cd /srv/out; touch cache/x/y a.pyc keep; "
        "truncate -s 3G disk; printf end | dd of=disk bs=1 seek=3000000000 conv=notrunc",
        "cd /srv/out && test ! -e cache && test ! -e a.pyc && test -e keep && "
        "test $(stat -c %s disk) = 3221225472 && test $(stat -c %b disk) -lt 1000 && "
        f'test "$(tail -c +3000000001 disk | head -c 3)" = end && echo 1 > {REWARD}',
        '[{ source = "/srv/out", exclude = ["cache", "*.pyc"] }]',
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}
    found = travelled(trajectory)
    assert {one.path: one.sparse for one in found.entries} == {
        "/srv/out/disk": True,
        "/srv/out/keep": False,
    }
    assert found.bytes < 1 << 20


async def test_separate_artifact_takes_the_place_of_what_the_image_has(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """What the agent removed must not come back from the verifier's image."""
    toml = (
        'artifacts = ["/srv/app", "/srv/file"]\n[environment]\nnetwork_mode = "no-network"\n'
        '[verifier]\nenvironment_mode = "separate"\n'
    )
    directory = write_task(
        tmp_path,
        toml=toml,
        environment__Dockerfile="FROM debian:bookworm\n"
        "RUN mkdir -p /srv/app && echo old > /srv/app/old && echo old > /srv/file\n",
        solution__solve_sh="#!/bin/sh\nrm /srv/app/old; echo new > /srv/file; umask 027; "
        "touch /srv/app/new; chmod 711 /srv/app; chown 7:8 /srv/app/new\n",
        tests__test_sh="#!/bin/sh\ntest ! -e /srv/app/old && test $(cat /srv/file) = new && "
        "test $(stat -c %a:%u:%g /srv/app/new) = 640:7:8 && test $(stat -c %a /srv/app) = 711 "
        f"&& echo 1 > {REWARD}\n",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}


async def test_separate_verifier_ignores_rewards_and_tests_among_the_artifacts(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """An artifact that covers the verifier's places brings nothing into them."""
    directory = separate_task(
        tmp_path,
        f"mkdir -p /logs/verifier; echo 1 > {REWARD}; echo 1 > /logs/agent/kept",
        "test -e /logs/agent/kept || exit 1; ls -A /logs/verifier",
        '[{ source = "/logs", destination = "all" }, "/tests"]',
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards is None
    assert trajectory.failure and trajectory.failure.code == "reward_missing"
    assert trajectory.verification and trajectory.verification.artifacts
    paths = [one.path for one in trajectory.verification.artifacts.entries]
    assert "/logs/agent/kept" in paths
    assert not [path for path in paths if path.startswith("/logs/verifier")]


async def test_separate_verifier_has_its_own_image_user_and_limits(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Whoever grades brings their own tools; the agent's image needs none of them."""
    toml = (
        'artifacts = ["/srv/out"]\n'
        + BASE
        + (
            '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\n'
            'memory_mb = 64\nnetwork_mode = "no-network"\n'
            'env = { LEVEL = "3" }\n'
        )
    )
    directory = write_task(
        tmp_path,
        toml=toml,
        solution__solve_sh="#!/bin/sh\necho work > /srv/out\n",
        tests__Dockerfile="FROM busybox\nCOPY test.sh /tests/test.sh\n",
        tests__test_sh="#!/bin/sh\n"
        f"[ ! -e /etc/debian_version ] && [ $LEVEL$(cat /srv/out) = 3work ] && echo 1 > {REWARD}\n",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    assert trajectory.verification and trajectory.identity.image
    assert trajectory.verification.image != trajectory.identity.image.digest


async def test_separate_mode_collects_what_only_a_live_process_knows(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A database's state is in its process until somebody asks for it."""
    toml = (
        'artifacts = ["/srv/out"]\n'
        + BASE
        + (
            '[verifier]\nenvironment_mode = "separate"\n'
            '[[verifier.collect]]\ncommand = "pgrep -x sleep > /srv/out; echo told"\n'
            '[[verifier.collect]]\ncommand = "exit 3"\n'
        )
    )
    directory = write_task(
        tmp_path,
        toml=toml,
        solution__solve_sh="#!/bin/sh\nsleep 1000 > /dev/null 2>&1 &\n",
        tests__test_sh=f"#!/bin/sh\ntest -s /srv/out && echo 1 > {REWARD}\n",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}
    assert trajectory.verification
    assert [one.exit_code for one in trajectory.verification.collected] == [0, 3]
    agent = trajectory.phases[-2]
    assert [one.name for one in agent.killed] == ["sleep"]
    assert agent.survivors == ()


async def test_artifacts_are_saved_with_the_attempt_without_secrets(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """They stay archives, which nobody has unpacked unasked; one with a secret is not kept."""
    directory = separate_task(
        tmp_path,
        "mkdir /srv/a; echo work > /srv/a/f; echo my-judge-key-1 > /srv/b",
        f"echo 1 > {REWARD}",
        '[{ source = "/srv/a", destination = "kept/here" }, "/srv/b"]',
    )
    toml = directory / "task.toml"
    toml.write_text(toml.read_text() + 'env = { JUDGE_KEY = "my-judge-key-1" }\n')
    images = ImageBuilder(native_async_client)
    attempt = Attempt(
        native_async_client,
        images,
        BlobStore(tmp_path / "blobs"),
        load_task(directory),
        AttemptSettings("run-test", "oracle"),
        sample=0,
        attempt=0,
        artifacts=tmp_path / "artifacts",
    )
    found = travelled(await attempt.run())
    await images.close()

    assert found.saved == ("kept/here.tar",)
    with tarfile.open(tmp_path / "artifacts" / "kept" / "here.tar") as archive:
        assert archive.getnames() == ["f"]
    assert [one.path for one in found.refused] == ["/srv/b"]
    manifest = BlobStore(tmp_path / "blobs").get(found.manifest).splitlines()
    assert [json.loads(line)["path"] for line in manifest] == ["/srv/a/f", "/srv/b"]


async def test_separate_artifacts_beyond_the_bounds_are_refused_and_the_rest_is_judged(
    run_attempt: RunAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk here is nobody's grade, and an agent must not escape its own by filling it."""
    monkeypatch.setattr(carry, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(carry, "MAX_ENTRIES", 50)
    directory = separate_task(
        tmp_path,
        "mkdir /srv/large /srv/many /srv/small; head -c 2000000 /dev/urandom > /srv/large/f; "
        "for i in $(seq 100); do : > /srv/many/$i; done; echo ok > /srv/small/f",
        f"test ! -e /srv/large && test ! -e /srv/many && test -e /srv/small/f && echo 0 > {REWARD}",
        '["/srv/large", "/srv/many", "/srv/small"]',
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}
    refused = {one.path: one.reason for one in travelled(trajectory).refused}
    assert "over 1048576 bytes" in refused["/srv/large"]
    assert "over 50 entries" in refused["/srv/many"]


async def test_separate_artifacts_that_take_too_long_do_not_spare_the_verdict(
    run_attempt: RunAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that is slow to read must not turn a 0 into a failure that is nobody's."""
    monkeypatch.setattr(carry, "TAKE_S", 0.0)
    directory = separate_task(
        tmp_path, "mkdir /srv/out; touch /srv/out/a", f"test ! -e /srv/out && echo 0 > {REWARD}"
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}
    assert [one.reason for one in travelled(trajectory).refused] == [carry.LATE] * 2


MISFITS = {
    "file where the image keeps what is excluded": "mkdir /srv/out; echo 1 > /srv/out/lib",
    "names too deep for any program": "mkdir /srv/out; cd /srv/out; n=$(printf %0200d 0); "
    'for i in $(seq 30); do mkdir $n; cd -P "$n"; done; : > leaf',
    "more than the verifier's disk": "mkdir /srv/out; head -c 30000000 /dev/urandom > /srv/out/f",
}


@pytest.mark.parametrize("misfit", MISFITS)
async def test_separate_artifact_that_does_not_fit_is_refused_and_the_rest_is_judged(
    run_attempt: RunAttempt, tmp_path: Path, misfit: str
) -> None:
    """What an agent leaves must not keep the verifier's sandbox from being made ready."""
    toml = (
        'artifacts = [{ source = "/srv/out", exclude = ["keep"] }, "/srv/small"]\n'
        '[environment]\ndocker_image = "debian:bookworm"\nnetwork_mode = "no-network"\n'
        '[verifier]\nenvironment_mode = "separate"\n'
        '[verifier.environment]\nnetwork_mode = "no-network"\nstorage_mb = 24\n'
    )
    directory = write_task(
        tmp_path,
        toml=toml,
        tests__Dockerfile="FROM debian:bookworm\n"
        "RUN mkdir -p /srv/out/lib && echo its > /srv/out/lib/keep\nCOPY test.sh /tests/test.sh\n",
        solution__solve_sh=f"#!/bin/bash\necho ok > /srv/small; {MISFITS[misfit]}\n",
        tests__test_sh="#!/bin/sh\ngrep -qx ok /srv/small && grep -qx its /srv/out/lib/keep "
        f"&& test ! -e /srv/out/f && echo 0 > {REWARD}\n",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}, trajectory.failure
    refused = travelled(trajectory).refused
    assert refused
    assert all(one.path.startswith("/srv/out") for one in refused)


async def test_separate_verifiers_sandbox_is_gone_afterwards_and_cannot_be_reached_before(
    run_attempt: RunAttempt, native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """A survivor of the agent shares no file, process or socket with what grades it."""
    directory = separate_task(
        tmp_path,
        "mkdir /srv/out; (while :; do echo 1 > /logs/verifier/reward.json; "
        "pgrep -f test.sh && touch /srv/seen; done > /dev/null 2>&1 &)",
        f"sleep 0.3; test $(ls /proc | grep -c '^[0-9]') -lt 8 && echo 0 > {REWARD}",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}
    assert await native_async_client.list_sandboxes() == ()
    assert trajectory.phases[-2].survivors == ()
