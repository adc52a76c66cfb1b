"""What an agent leaves so that there is no verdict: there is one all the same, or it is its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from coldframe.host import guard
from coldframe.rollouts.attribution import may_retry
from tests.integration.rollouts.conftest import RunAttempt, run_attempt  # noqa: F401 (a fixture)
from tests.unit.rollouts.tasks import write_task

pytestmark = pytest.mark.root
TEXT = "/logs/verifier/reward.txt"
BROKEN = """
[environment]
network_mode = "no-network"
{environment}
[agent]
user = "root"
[verifier]
user = "{user}"
timeout_sec = 3
"""
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


@dataclass(frozen=True)
class Broken:
    """What an agent breaks as its last act; tests that give 0 wherever nobody broke anything."""

    solve: str
    test: str = f"echo 0 > {TEXT}"
    user: str = "root"
    verdict: bool = False
    """It is graded all the same; else it has no verdict, and that is the agent's doing."""
    environment: str = ""


HOLD_SHARED_MEMORY = (
    "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"
    "for _ in range(28):\n    one = libc.shmget(0, 4 << 20, 0o1666)\n"
    "    ctypes.memset(ctypes.c_void_p(libc.shmat(one, None, 0)), 1, 4 << 20)\n"
)
NEEDS_MEMORY = f"python3 -c 'len(bytearray(1) * (60 << 20))' && echo 0 > {TEXT}"
SMALL = "memory_mb = 128"
BREAKS = {
    "user removed": Broken("sed -i /^games:/d /etc/passwd", user="games", verdict=True),
    "user with another number": Broken(
        "sed -i s/^games:x:5:/games:x:6:/ /etc/passwd",
        f'[ "$(id -u)" = 5 ] && echo 0 > {TEXT}',
        user="games",
        verdict=True,
    ),
    "users removed": Broken("rm /etc/passwd /etc/group", user="games", verdict=True),
    "users in a file without end": Broken(
        "truncate -s 100G /etc/passwd", user="games", verdict=True
    ),
    "users in a fifo": Broken("rm /etc/passwd; mkfifo /etc/passwd", user="games"),
    "home of root": Broken(
        "sed -i s,:/root:,:/nowhere:, /etc/passwd",
        f"[ $HOME = /root ] && echo 0 > {TEXT}",
        verdict=True,
    ),
    "shell removed": Broken("rm /bin/sh /usr/bin/bash"),
    "shell without its right to be run": Broken("chmod 644 /usr/bin/bash", user="games"),
    "loader removed": Broken("rm /lib64/ld-linux-x86-64.so.2"),
    "library emptied": Broken(": > /lib/x86_64-linux-gnu/libc.so.6"),
    "program removed": Broken("rm /usr/bin/head", f"head -c 2 /tests/zero > {TEXT}"),
    "interpreter removed": Broken(
        "rm /usr/bin/python3*",
        "cd /logs/verifier; python3 -c 'print(0)' > x; cp x reward.txt",
    ),
    "interpreter that does nothing": Broken(
        "printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/python3.11", f"python3 -c 'print(0)' > {TEXT}"
    ),
    "system closed to others": Broken("chmod 700 /usr", user="games"),
    "root directory closed to others": Broken("chmod 700 /", user="games"),
    "no place for temporary files": Broken(
        "rm -rf /tmp; : > /tmp", f"mktemp > /dev/null && echo 0 > {TEXT}"
    ),
    "devices removed": Broken(
        "rm /dev/null /dev/zero", f"head -c 1 /dev/zero > /dev/null && echo 0 > {TEXT}"
    ),
    "working directory removed": Broken(
        "cd /; rm -rf /srv/work", f"[ $PWD = /srv/work ] && echo 0 > {TEXT}"
    ),
    "locale removed": Broken("rm -rf /usr/lib/locale /usr/share/i18n", verdict=True),
    "shared memory filled": Broken(
        "head -c 110M /dev/zero > /dev/shm/x", NEEDS_MEMORY, environment=SMALL
    ),
    "shared memory without a file": Broken(
        f"python3 -c '{HOLD_SHARED_MEMORY}'", NEEDS_MEMORY, environment=SMALL
    ),
    "survivor that kills the tests": Broken(
        "cat > /k.py <<'END'\nimport os, signal\nopen('/up', 'w').close()\nwhile True:\n"
        "    for one in os.listdir('/proc'):\n"
        "        try:\n            if b'/tests/' in open(f'/proc/{one}/cmdline', 'rb').read():\n"
        "                os.kill(int(one), signal.SIGKILL)\n"
        "        except (OSError, ValueError):\n            pass\nEND\n"
        "python3 /k.py > /dev/null 2>&1 & until [ -e /up ]; do sleep 0.01; done",
        f"sleep 1; echo 0 > {TEXT}",
    ),
    "survivor that never answers": Broken(
        "python3 -c \"import socket, time; one = socket.create_server(('127.0.0.1', 80)); "
        "open('/up', 'w').close(); time.sleep(600)\" > /dev/null 2>&1 & "
        "until [ -e /up ]; do sleep 0.01; done",
        f"exec 3<> /dev/tcp/127.0.0.1/80 && read -r line <&3; echo 0 > {TEXT}",
    ),
    "survivor that changes the tests": Broken(
        "(: > /up; until [ -e /tests/go ]; do sleep 0.01; done; echo >> /tests/zero; : > /changed)"
        " > /dev/null 2>&1 & until [ -e /up ]; do sleep 0.01; done",
        f": > /tests/go; [ ! -e /up ] || until [ -e /changed ]; do sleep 0.01; done; "
        f"echo 0 > {TEXT}",
    ),
    "tests changed by what they run": Broken(
        "echo 'echo >> /tests/zero' > /go", f"[ ! -e /go ] || bash /go; echo 0 > {TEXT}"
    ),
}


def breaking(root: Path, broken: Broken) -> Path:
    return write_task(
        root,
        toml=BROKEN.format(user=broken.user, environment=broken.environment),
        environment__Dockerfile="FROM debian:bookworm\nWORKDIR /srv/work\n",
        solution__solve_sh=f"#!/bin/bash\n{broken.solve}\nexit 0\n",
        tests__test_sh=f"#!/bin/bash\n{broken.test}\n",
        tests__zero="0\n",
    )


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS.keys())
async def test_what_grading_rests_on_and_the_agent_has_broken_is_booked_on_the_agent(
    broken: Broken,
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Else whoever is failing breaks it, and the attempt counts as a fault of the verifier's."""
    directory = breaking(tmp_path, broken)
    control = await run_attempt(directory, "nop")
    trajectory = await run_attempt(directory)

    assert control.rewards == {"reward": 0.0}, control.failure
    if broken.verdict:
        assert trajectory.rewards == {"reward": 0.0}, trajectory.failure
    else:
        assert trajectory.rewards is None
        assert trajectory.failure
        failure = trajectory.failure
        assert (failure.side, failure.code) == ("policy", "grading_prevented"), failure
        assert not may_retry(failure)


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("exit 1", "reward_missing"),
        (f"[ -e /made ] || echo 0 > {TEXT}", "reward_missing"),
        ("kill -9 $$", "reward_missing"),
        ("sleep 60", "verifier_deadline"),
        ("echo >> /tests/zero", "tampered"),
    ],
)
async def test_tests_that_fail_by_themselves_stay_the_verifiers_failure(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
    test: str,
    code: str,
) -> None:
    """Whatever an honest agent leaves: its work, a service that runs, or a changed system."""
    work = "echo > /made; sleep 600 > /dev/null 2>&1 & "
    changed = work if "made" in test else work + "rm /usr/bin/head"
    trajectory = await run_attempt(breaking(tmp_path, Broken(changed, test)))

    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == ("verifier", code)
