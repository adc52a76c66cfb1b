"""What an agent leaves so that there is no verdict: there is one all the same, or it is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.host import guard
from tests.integration.rollouts.conftest import RunAttempt, run_attempt  # noqa: F401 (a fixture)
from tests.unit.rollouts.tasks import write_task

pytestmark = pytest.mark.root
TEXT = "/logs/verifier/reward.txt"
TOML = """
[environment]
docker_image = "debian:bookworm"
network_mode = "no-network"
{environment}
[verifier]
timeout_sec = {timeout}
"""


def task(root: Path, solve: str, test: str, *, timeout: float = 60, environment: str = "") -> Path:
    return write_task(
        root,
        toml=TOML.format(environment=environment, timeout=timeout),
        solution__solve_sh=f"#!/bin/bash\n{solve}\nexit 0\n",
        tests__test_sh=f"#!/bin/bash\n{test}\n",
    )


async def test_disk_that_the_agent_has_filled_leaves_room_to_grade(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Else whoever is failing fills the disk, and the attempt does not count."""
    directory = task(
        tmp_path,
        "head -c 1G /dev/zero > /fill; echo more > /more && [ -s /more ] && touch /not-full",
        "set -e; [ ! -s /more ]; [ ! -e /not-full ]; head -c 20M /dev/zero > /tmp/work; "
        f"echo 0 > {TEXT}",
        environment="storage_mb = 100",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}, trajectory.failure


@pytest.mark.parametrize(
    ("test", "side", "code"),
    [
        ("bash /work/run", "policy", "grading_prevented"),
        ("sleep 60", "verifier", "verifier_deadline"),
    ],
)
async def test_deadline_is_the_agents_when_the_tests_were_at_work_on_what_it_left(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
    test: str,
    side: str,
    code: str,
) -> None:
    """An endless loop would else be a wrong answer that does not count; slow tests are not its."""
    directory = task(
        tmp_path, "mkdir -p /work; echo 'while :; do sleep 1; done' > /work/run", test, timeout=2
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards is None
    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == (side, code)
    assert ("/work/run" in trajectory.failure.message) is (side == "policy")


HOLD_THREADS = (
    "import threading, time\n"
    "while True:\n"
    "    try:\n        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "    except RuntimeError:\n        open('/full', 'w').close(); time.sleep(0.01)\n"
)


async def test_threads_of_a_survivor_that_leave_the_tests_none_do_not_spare_the_verdict(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """One process with all the threads there may be: by processes alone it is not seen."""
    directory = task(
        tmp_path,
        f"cat > /p.py <<'END'\n{HOLD_THREADS}END\npython3 /p.py > /dev/null 2>&1 &\n"
        "until [ -e /full ]; do sleep 0.05; done",
        f"true | true | true | true || exit 1; /bin/true || exit 1; echo 0 > {TEXT}",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}, trajectory.failure
    assert trajectory.verification
    assert trajectory.verification.again or trajectory.phases[-1].killed


async def test_survivors_that_take_the_processor_do_not_spare_the_verdict(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The tests take longer than they may beside them, and not alone."""
    directory = task(
        tmp_path,
        "for i in $(seq 60); do (while :; do :; done > /dev/null 2>&1 &); done",
        f"i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; echo 0 > {TEXT}",
        timeout=8,
        environment="cpus = 0.2",  # so little that a busy machine gives it to them all the same
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}, trajectory.failure
    assert trajectory.verification
    assert trajectory.verification.again


async def test_survivors_of_whom_more_is_seen_than_can_be_judged_do_not_spare_the_verdict(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is vouched for beside them; alone it is."""
    monkeypatch.setattr(guard, "MOST_WAITING", 1000)
    directory = task(
        tmp_path,
        "(i=0; while :; do i=$((i+1)); : > /tmp/$i; done > /dev/null 2>&1 &)",
        f"until [ $(ls -U /tmp | wc -l) -gt 3000 ]; do sleep 0.05; done; echo 0 > {TEXT}",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}, trajectory.failure
    assert trajectory.verification
    assert trajectory.verification.again
