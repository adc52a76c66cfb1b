"""Rewards that an agent plants, by every way known: none of them counts.

Each case has a control: a verifier without walls, which keeps what lies there, uploads over it,
runs test.sh and reads the file. It shows what the plant would have given. In the guarded run the
tests say 0, and 0 must come out; where the agent's own sandbox cannot keep something out, the
record says so, and a separate verifier does keep it out.
"""

from __future__ import annotations

import os
import select
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from coldframe.client import AsyncSandbox, AsyncSandboxClient
from coldframe.harnesses.scripts import pack
from coldframe.host.fanotify import OPEN_PERM, Event
from coldframe.host.provenance import Ledger, path_of
from coldframe.host.roottree import closing
from coldframe.protocol.models import Reason
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import load_task
from coldframe.rollouts.task import Task
from coldframe.trajectories.schema import Trajectory
from tests.integration.rollouts.conftest import RunAttempt, run_attempt  # noqa: F401 (a fixture)
from tests.unit.rollouts.tasks import write_task

pytestmark = pytest.mark.root
DIR = "/logs/verifier"
TEXT, JSON = f"{DIR}/reward.txt", f"{DIR}/reward.json"
ZERO = f"echo 0 > {TEXT}"
SLOW = f"{ZERO}; sleep 0.4"
TURN = "if [ -e /tmp/up ]; then : > /tmp/go; until [ -e /tmp/turned ]; do sleep 0.01; done; fi"
"""Wait, if there is a survivor, until it has done its work once more since the tests began."""
DOCKERFILE = (
    f"FROM debian:bookworm\nRUN mkdir -p {DIR} /tests /work && chmod 777 /logs {DIR} /tests /work\n"
)
TOML = """
[environment]
network_mode = "no-network"
workdir = "/work"
[agent]
user = "{user}"
[verifier]
timeout_sec = 20
environment_mode = "{mode}"
[metadata.coldframe]
full_kill = {full_kill}
"""
LOOP = "while :; do {write}; done > /dev/null 2>&1 &"
UP = "until [ -e /tmp/up ]; do sleep 0.01; done"
TURNS = (
    "(: > /tmp/up; while :; do go=; [ -e /tmp/go ] && go=1; {write}; "
    '[ -z "$go" ] || : > /tmp/turned; done) > /dev/null 2>&1 & ' + UP
)
SLEEPER = (
    "(: > /tmp/up; until [ -e /tmp/go ]; do sleep 0.01; done; {write}; : > /tmp/turned) "
    "> /dev/null 2>&1 & " + UP
)
HOLD = (
    "import os, time\n"
    f"fd = os.open('{TEXT}', os.O_RDWR | os.O_CREAT, 0o666); os.chmod('{TEXT}', 0o666)\n"
    f"top = os.open('{DIR}', os.O_RDONLY)\n"
    "open('/tmp/up', 'w').close()\n"
    "while True:\n    os.ftruncate(fd, 0); os.pwrite(fd, b'1', 0)\n    try:\n"
    "        os.write(os.open('reward.json', os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=top), b'1')\n"
    "    except OSError:\n        pass\n    time.sleep(0.005)\n"
)
WATCH = (
    "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nwatch = libc.inotify_init()\n"
    f"libc.inotify_add_watch(watch, b'{DIR}', 8 | 256)\nopen('/tmp/up', 'w').close()\n"
    "while True:\n    os.read(watch, 4096)\n"
    "    with open('/logs/x', 'w') as file:\n        file.write('1')\n"
    f"    os.rename('/logs/x', '{TEXT}'); time.sleep(0.01)\n"
)
CUT = (
    "import os, time\nopen('/tmp/up', 'w').close()\n"
    "while True:\n    go = os.path.exists('/tmp/go')\n"
    f"    try:\n        os.truncate('{TEXT}', 0); open('{TEXT}', 'w').write('1')\n"
    "    except OSError:\n        pass\n"
    "    if go:\n        open('/tmp/turned', 'w').close()\n    time.sleep(0.01)\n"
)


def python(program: str) -> str:
    """A plant that leaves a Python program running, and waits until it says that it does."""
    return f"cat > /tmp/p.py <<'END'\n{program}END\npython3 /tmp/p.py > /dev/null 2>&1 &\n{UP}"


@dataclass(frozen=True)
class Plant:
    """What an agent leaves, and what a verifier without walls then reads; None: nothing valid."""

    script: str
    naive: str | None = "1"
    user: str = "root"
    test: str = ZERO
    rewards: float | None = 0.0
    """None: the verdict is void, or missing, and never the planted one."""


KEPT_OUT = {
    "text": Plant(f"echo 1 > {TEXT}", test="true", rewards=None),
    "json beats text": Plant(f"echo 1 > {JSON}"),
    "json by an unprivileged agent": Plant(f"echo 1 > {JSON}", user="nobody"),
    "with a time to come": Plant(f"echo 1 > {JSON}; touch -d 2099-01-01 {JSON}"),
    "link to a file": Plant(f"echo 1 > /tmp/r; ln -s /tmp/r {JSON}"),
    "link to a file that comes later": Plant(
        f"ln -s /tmp/r {JSON}; (sleep 0.1; echo 1 > /tmp/r) > /dev/null 2>&1 &", test=SLOW
    ),
    "dangling link": Plant(f"ln -s /nowhere/x {TEXT}", naive=None),
    "link to /dev/null": Plant(f"ln -s /dev/null {TEXT}", naive=""),
    "hard link that is written by its other name": Plant(
        f"echo 1 > /tmp/r; ln /tmp/r {TEXT}; {LOOP.format(write='echo 1 > /tmp/r')}",
        test=SLOW,
        user="nobody",
    ),
    "fifo with a feeder": Plant(
        f"mkfifo {JSON}; {LOOP.format(write=f'echo 1 > {JSON}')}", user="nobody"
    ),
    "directory": Plant(f"mkdir {TEXT}", naive=None),
    "full directory in the way": Plant(f"mkdir -p {JSON}/a/b/c; touch {JSON}/a/b/c/d", naive="0"),
    "socket": Plant(
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('" + TEXT + "')\"",
        naive=None,
    ),
    "sparse and huge": Plant(f"truncate -s 1T {JSON}", naive=None),
    "logs is a link": Plant(
        "mkdir -p /tmp/l/verifier; echo 1 > /tmp/l/verifier/reward.json; rm -rf /logs; "
        "ln -s /tmp/l /logs"
    ),
    "verifier's directory is a link": Plant(
        f"mkdir /tmp/v; echo 1 > /tmp/v/reward.json; rmdir {DIR}; ln -s /tmp/v {DIR}",
        user="nobody",
    ),
    "logs is a file": Plant("rm -rf /logs; echo 1 > /logs", naive=None),
    "closed directories": Plant(f"echo 1 > {JSON}; chmod 0 {JSON} {DIR} /logs"),
    "descriptors kept open": Plant(python(HOLD), user="nobody", test=SLOW),
    "loop of an unprivileged survivor": Plant(
        LOOP.format(write=f"echo 1 > {JSON}"), user="nobody", test=SLOW
    ),
    "watcher that overwrites": Plant(python(WATCH), user="nobody", test=SLOW),
    "directory swapped by its owner": Plant(
        f"mkdir /logs/mine; echo 1 > /logs/mine/reward.json; rm -rf {DIR}; "
        f"{LOOP.format(write=f'rm -rf {DIR}; cp -r /logs/mine {DIR}')} sleep 0.1",
        user="nobody",
        test=SLOW,
    ),
    "directory made anew in a loop": Plant(
        LOOP.format(write=f"mkdir {DIR} && chmod 777 {DIR}; echo 1 > {JSON}") + " sleep 0.05",
        user="nobody",
        test=SLOW,
    ),
    "files made in a loop, deep down": Plant(
        f"mkdir -p {DIR}/a/b; cd {DIR}/a/b; for i in 1 2 3 4; do "
        f"(while :; do : > $(date +%N); echo 1 > {JSON}; mkdir -p {DIR}/a/b; done "
        "> /dev/null 2>&1 &); done; sleep 0.05",
        user="nobody",
        test=SLOW,
    ),
    "tests made before": Plant(
        f"echo 'echo 1 > {JSON}' > /tests/helper; chmod -w /tests/helper",
        user="nobody",
        test=f"[ -e /tests/helper ] && . /tests/helper; {ZERO}",
    ),
    "tests directory is a link": Plant(
        f"mkdir /tmp/t; echo 'echo 1 > {JSON}' > /tmp/t/helper; rmdir /tests; ln -s /tmp/t /tests",
        test=f"[ -e /tests/helper ] && . /tests/helper; {ZERO}",
    ),
    "test.sh replaced in a loop": Plant(
        f"printf '#!/bin/sh\\necho 1 > {TEXT}\\n' > /tmp/t; chmod 755 /tmp/t; "
        f"{LOOP.format(write='cp /tmp/t /tests/.n && mv /tests/.n /tests/test.sh')} sleep 0.1",
        user="nobody",
    ),
    "profile of a login shell": Plant(
        f"echo 'trap \"echo 1 > {JSON}\" EXIT' > /etc/profile.d/x.sh; echo '. /etc/profile.d/x.sh' "
        ">> /root/.bashrc; echo BASH_ENV=/etc/profile.d/x.sh >> /etc/environment"
    ),
    "words on stdout": Plant(
        "echo 'reward: 1' > /work/said", naive="0", test=f"cat /work/said; {ZERO}"
    ),
    "working directory removed": Plant("cd /; rm -rf /work", naive="0"),
}


ROOT_SURVIVORS = {
    "loop of a root survivor": Plant(
        TURNS.format(write=f"echo 1 > {TEXT}"), test=f"{ZERO}; {TURN}"
    ),
    "json loop of a root survivor": Plant(
        TURNS.format(write=f"echo 1 > {JSON}"), test=f"{ZERO}; {TURN}"
    ),
    "sleeper that wakes while the tests run": Plant(
        SLEEPER.format(write=f"echo 1 > {JSON}"), test=f"{ZERO}; {TURN}"
    ),
    "way through the tests' own root": Plant(
        TURNS.format(write=f"for p in /proc/[0-9]*; do echo 1 > $p/root{JSON}; done"),
        test=f"{ZERO}; {TURN}",
    ),
    "descriptors of the tests": Plant(
        TURNS.format(
            write="for f in /proc/[0-9]*/fd/[0-9]*; do "
            f'case "$(readlink $f)" in {DIR}/*) echo 1 > $f;; esac; done'
        ),
        test=f"exec 3> {TEXT}; {ZERO}; {TURN}",
    ),
    "empty file of a refused open, which the tests look into": Plant(
        TURNS.format(write=f"echo 1 > {JSON}"), test=f"{ZERO}; {TURN}; cat {DIR}/* > /tmp/seen"
    ),
    "second name of the reward": Plant(
        TURNS.format(write=f"ln -f {TEXT} {DIR}/mine && echo 1 > {DIR}/mine"),
        test=f"{ZERO}; {TURN}",
    ),
}
"""What root leaves running, and reaches for the reward: refused by name, and told."""

REPLACED = "printf '#!/bin/sh\\necho 1 > " + JSON + '\\nexec /usr/bin/{real} "$@"\\n\''
CHILD = f"sh -c 'echo 1 > {JSON}'"
LED = {
    "program before it on the PATH": Plant(
        f"{REPLACED.format(real='env')} > /usr/local/bin/env; chmod 755 /usr/local/bin/env",
        test=f"env > /dev/null; {ZERO}",
    ),
    "module of the user's site": Plant(
        "d=$(python3 -m site --user-site); mkdir -p $d; "
        f"echo \"import os; os.path.isdir('{DIR}') and open('{JSON}', 'w').write('1')\" > $d/x.pth",
        test=f"python3 -c 'print()'; {ZERO}",
    ),
    "module in the working directory": Plant(
        f"echo \"open('{JSON}', 'w').write('1')\" > /work/conftest.py",
        user="nobody",
        test=f"cd /work && python3 -c 'import importlib; importlib.import_module(\"conftest\")'; "
        f"{ZERO}",
    ),
    "module that has another process write": Plant(
        f'echo "import os; os.system(\\"{CHILD}\\")" > /work/mine.py',
        test=f"cd /work; python3 -c 'import mine'; {ZERO}",
    ),
    "module whose orphan writes": Plant(
        f"echo \"import os; os.fork() or (os.fork() or (open('{JSON}', 'w').write('1')), "
        'os._exit(0))" > /work/mine.py',
        test=f"cd /work; python3 -c 'import mine'; sleep 0.2; {ZERO}",
    ),
    "module whose descendant, a thousand below, writes": Plant(
        "echo 'import os; os.system(os.environ[\"C\"])' > /work/mine.py",
        test="export n=1005 C='n=$((n-1)); "
        f'if [ $n = 0 ]; then echo 1 > {JSON}; else sh -c "$C"; fi; :\'; '
        f"cd /work; python3 -c 'import mine'; {ZERO}",
    ),
    "script of the agent's": Plant(
        f"echo 'echo 1 > {JSON}' > /work/run.sh", test=f"sh /work/run.sh; {ZERO}"
    ),
    "script without a name that tells": Plant(
        f"echo 'echo 1 > {JSON}' > /work/run", test=f"sh /work/run; {ZERO}"
    ),
    "script that the tests copy first": Plant(
        f"echo 'echo 1 > {JSON}' > /work/run",
        test=f"cp /work/run /tmp/copied; sh /tmp/copied; {ZERO}",
    ),
    "commands for a program that runs them": Plant(
        f'echo "1e {CHILD}" > /work/commands; echo > /work/empty',
        test=f"sed -f /work/commands /work/empty; {ZERO}",
    ),
    "program in shared memory": Plant(
        f"printf '#!/bin/sh\\necho 1 > {JSON}\\n' > /dev/shm/run; chmod 755 /dev/shm/run",
        test=f"sh /dev/shm/run; {ZERO}",
    ),
    "program that a survivor makes while the tests run": Plant(
        SLEEPER.format(write=f"echo 'echo 1 > {JSON}' > /work/run"),
        test=f"{TURN}; sh /work/run; {ZERO}",
    ),
    "file that is moved to the reward": Plant(
        f"echo 'echo 1 > {DIR}/mine; mv {DIR}/mine {JSON}' > /work/run",
        test=f"sh /work/run; {ZERO}",
    ),
    "Python script": Plant(
        f"echo \"open('{JSON}', 'w').write('1')\" > /work/run.py",
        test=f"python3 /work/run.py; {ZERO}",
    ),
    "Python script from stdin": Plant(
        f"echo \"open('{JSON}', 'w').write('1')\" > /work/run.py",
        test=f"python3 < /work/run.py; {ZERO}",
    ),
    "module that cannot be kept compiled": Plant(
        f"echo \"open('{JSON}', 'w').write('1')\" > /work/mine.py; touch /work/__pycache__",
        test=f"cd /work; python3 -c 'import mine'; {ZERO}",
    ),
    "module of a Python that keeps nothing": Plant(
        f"echo \"open('{JSON}', 'w').write('1')\" > /work/mine.py",
        test=f"cd /work; python3 -sB -c 'import mine'; {ZERO}",
    ),
    "module that was compiled before": Plant(
        f"cd /work; echo 'import os' > mine.py; python3 -c 'import mine'; "
        f"echo \"open('{JSON}', 'w').write('1')\" > mine.py; python3 -m compileall -q -b mine.py; "
        "rm mine.py",
        test=f"cd /work; rm -f {JSON}; python3 -c 'import mine'; {ZERO}",
    ),
    "archive that unpacks onto the reward": Plant(
        f"mkdir -p /tmp/x{DIR}; echo 1 > /tmp/x{JSON}; tar -cf /work/a.tar -C /tmp/x logs",
        test=f"tar -xf /work/a.tar -C /; {ZERO}",
    ),
    "directory in place of the reward": Plant(
        f"echo 'mkdir {JSON}' > /work/run", naive="0", test=f"sh /work/run; {ZERO}"
    ),
}
"""What the tests run of the agent's, beside the process that writes the reward."""

PREVENTED = {
    "replaced interpreter": Plant(
        f"cp /usr/bin/dash /usr/bin/dash.real; {REPLACED.format(real='dash.real')} > /tmp/d; "
        "sed -i '1s,.*,#!/usr/bin/dash.real,' /tmp/d; chmod 755 /tmp/d; mv /tmp/d /usr/bin/dash",
        rewards=None,
    ),
    "library in ld.so.preload": Plant(
        "cp /solution/plant.so /usr/lib/plant.so; echo /usr/lib/plant.so > /etc/ld.so.preload",
        rewards=None,
    ),
    "reward that is taken away": Plant(
        f"echo '(until [ -s {TEXT} ]; do sleep 0.01; done; echo 1 > {DIR}/mine; "
        f"mv {DIR}/mine {TEXT}; : > /tmp/moved) &' > /work/run",
        test=f"sh /work/run; {ZERO}; "
        "if [ -e /work/run ]; then until [ -e /tmp/moved ]; do sleep 0.01; done; fi",
        rewards=None,
    ),
    "reward that is cut short by its name": Plant(
        python(CUT), test=f"{ZERO}; {TURN}; cat {DIR}/* > /tmp/seen", rewards=None
    ),
    "reward that is cut to another number": Plant(
        python(CUT.replace("0)", "1)", 1)),
        test=f"echo 1e-999 > {TEXT}; {TURN}",
        rewards=None,
    ),
    "replaced program, behind the noise of a survivor": Plant(
        "cp /usr/bin/env /usr/bin/env.real; "
        f"{REPLACED.format(real='env.real')} > /tmp/e; chmod 755 /tmp/e; mv /tmp/e /usr/bin/env; "
        + TURNS.format(write=f"for i in $(seq 200); do echo 1 > {DIR}/$i; done"),
        test=f"{TURN}; /usr/bin/env sh -c 'echo 0 > {TEXT}'",
        rewards=None,
    ),
    "directory in the reward's place": Plant(
        TURNS.format(write=f"mkdir {TEXT}; echo 1 > {JSON}"), test=f"{TURN}; {ZERO}", rewards=None
    ),
}
"""What leaves no clean verdict: no reward, and booked on the agent."""
TOLD_BY = {
    "replaced interpreter": "/bin/sh",
    "library in ld.so.preload": "/etc/ld.so.preload",
}


def written(root: Path, plant: Plant, mode: str = "shared", *, full_kill: bool = False) -> Path:
    directory = write_task(
        root,
        mode + str(full_kill),
        toml=TOML.format(user=plant.user, mode=mode, full_kill=str(full_kill).lower()),
        environment__Dockerfile=DOCKERFILE,
        solution__solve_sh=f"#!/bin/sh\n{plant.script}\nexit 0\n",
        tests__test_sh=f"#!/bin/sh\n{plant.test}\nexit 0\n",
    )
    if "plant.so" in plant.script:
        compile_library(directory / "solution" / "plant.so")
    return directory


def compile_library(target: Path) -> None:
    """A library that writes the reward as soon as it is loaded."""
    source = target.with_name("plant.c")
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n__attribute__((constructor)) void f(void) {\n"
        f'int fd = open("{JSON}", O_WRONLY | O_CREAT, 0666); if (fd >= 0) write(fd, "1", 1); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", target, source], check=True)
    source.unlink()


async def naive(
    client: AsyncSandboxClient, task: Task, image: str, wanted: str | None = "1"
) -> str | None:
    """Grade without any wall; return what the reward file holds, if it is a number."""
    (step,) = task.steps
    async with await client.create_sandbox(image, workdir="/work") as sandbox:
        assert step.reference is not None
        await sandbox.files.tar_up("/solution", pack(step.reference), owner=(0, 0))
        await sandbox.exec(["/solution/solve.sh"], user=step.agent.user)
        script = step.verifier.tests[0] / "test.sh"
        await sandbox.exec(
            "mkdir -p /tests /logs/verifier; rm -f /tests/test.sh; cat > /tests/test.sh; "
            "chmod 755 /tests/test.sh; sleep 0.05",
            user=0,
            cwd="/",
            stdin=script.read_bytes(),
        )
        exists = await sandbox.files.exists("/work")
        await sandbox.exec(
            ["/bin/bash", "-lc", "/tests/test.sh; true"],
            user=0,
            cwd="/work" if exists else "/",
            env={"HOME": "/root"},
            deadline_s=20.0,
        )
        for _ in range(50):
            # Whoever writes in a loop leaves the file empty at times; one look is luck.
            found = await read_naively(sandbox)
            if found == wanted:
                break
        return found


async def read_naively(sandbox: AsyncSandbox) -> str | None:
    result = await sandbox.exec(
        f"if [ -e {JSON} ] && [ ! -d {JSON} ]; then head -c 1000 {JSON}; else cat {TEXT}; fi",
        user=0,
        cwd="/",
        deadline_s=3.0,
    )
    if result.reason is Reason.DEADLINE or not result.ok:
        return None
    text = result.text.strip()
    return None if "\0" in text else text.splitlines()[0] if text else ""


@pytest.fixture
async def base(native_async_client: AsyncSandboxClient, tmp_path: Path) -> str:
    """The image that all cases share; built once on this machine."""
    images = ImageBuilder(native_async_client)
    task = load_task(written(tmp_path, Plant("true")))
    return (await images.image(task)).name


def verdict(trajectory: Trajectory) -> float | None:
    return None if trajectory.rewards is None else trajectory.rewards["reward"]


def plants(cases: dict[str, Plant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("plant", cases.values(), ids=cases.keys())


@plants(KEPT_OUT)
async def test_planted_reward_does_not_count(
    plant: Plant,
    native_async_client: AsyncSandboxClient,
    run_attempt: RunAttempt,  # noqa: F811
    base: str,
    tmp_path: Path,
) -> None:
    """In the agent's own sandbox; the control shows what it would have been worth."""
    directory = written(tmp_path, plant)
    control = await naive(native_async_client, load_task(directory), base, plant.naive)
    trajectory = await run_attempt(directory)

    assert control == plant.naive
    assert verdict(trajectory) == plant.rewards, trajectory.failure
    if plant.rewards is None:
        assert trajectory.failure and trajectory.failure.code == "reward_missing"


@plants(ROOT_SURVIVORS)
async def test_reward_of_a_root_survivor_never_counts_and_is_told(
    plant: Plant,
    native_async_client: AsyncSandboxClient,
    run_attempt: RunAttempt,  # noqa: F811
    base: str,
    tmp_path: Path,
) -> None:
    """It is root where the tests run; the directory lets nobody in whom test.sh did not start."""
    directory = written(tmp_path, plant)
    control = await naive(native_async_client, load_task(directory), base)
    shared = await run_attempt(directory)
    separate = await run_attempt(written(tmp_path, plant, "separate"))

    assert control == "1"
    assert (verdict(shared), verdict(separate)) == (0.0, 0.0), shared.failure
    # The processes of the tests are out of its reach, so there it is not even refused.
    told = set() if "/fd/" in plant.script else {"reward_refused"}
    assert {one.what for one in shared.tamper} == told
    assert not any(one.voided for one in shared.tamper)
    assert shared.verification
    assert (shared.verification.guarded, shared.verification.forgeable) == (True, False)
    assert separate.tamper == ()


@plants(LED)
async def test_reward_by_what_the_tests_run_of_the_agents_never_counts(
    plant: Plant,
    native_async_client: AsyncSandboxClient,
    run_attempt: RunAttempt,  # noqa: F811
    base: str,
    tmp_path: Path,
) -> None:
    """Tests are there to run what the agent made; what it says of itself is no verdict."""
    directory = written(tmp_path, plant)
    control = await naive(native_async_client, load_task(directory), base, plant.naive)
    shared = await run_attempt(directory)
    separate = await run_attempt(written(tmp_path, plant, "separate"))

    assert control == plant.naive
    assert (verdict(shared), verdict(separate)) == (0.0, 0.0), shared.failure


@plants(PREVENTED)
async def test_reward_by_replaced_programs_never_counts_and_is_the_agents_failure(
    plant: Plant,
    request: pytest.FixtureRequest,
    native_async_client: AsyncSandboxClient,
    run_attempt: RunAttempt,  # noqa: F811
    base: str,
    tmp_path: Path,
) -> None:
    """It must neither pass nor count as the verifier's fault, which nobody learns from."""
    directory = written(tmp_path, plant)
    control = await naive(native_async_client, load_task(directory), base)
    shared = await run_attempt(directory)
    separate = await run_attempt(written(tmp_path, plant, "separate"))

    assert control == "1"
    assert shared.rewards is None
    assert shared.failure
    assert (shared.failure.side, shared.failure.code) == ("policy", "grading_prevented")
    assert verdict(separate) == 0.0, separate.failure
    told = {one.path for one in shared.tamper if one.what == "program_changed"}
    assert TOLD_BY.get(request.node.callspec.id) in told | {None}


READS = "import sys; open('{to}', 'w').write(str(int('right' in open('/work/answer.py').read())))"
PRINTS = "print(int('right' in open('/work/answer.py').read()))"
BECOMES = (
    "import os; open('/work/answer.py').read(); fd = os.open('{to}', os.O_WRONLY | os.O_CREAT); "
    "os.dup2(fd, 1); os.execv('/usr/bin/python3', ['python3', '-I', '/work/answer.py'])"
)
SHEDS = (
    "import os, sys\nif len(sys.argv) == 1:\n"
    "    os.execv('/usr/bin/python3', ['python3', '-IB', '/tests/grade.py', 'again'])\n"
    "os.dup2(os.open('{to}', os.O_WRONLY | os.O_CREAT), 1); sys.path.insert(0, '/work')\n"
    "import answer; sys.stdout.flush(); os.execv('/bin/true', ['true'])\n"
)
IMPORTS = "import sys; sys.path.insert(0, '/work'); import answer; open('{to}', 'w').write('1')"


async def graded_by(
    run_attempt: RunAttempt,  # noqa: F811
    root: Path,
    grader: str,
    extra: str = "",
    onto: str = "",
) -> Trajectory:
    plant = Plant(
        "echo 'print(1) # right' > /work/answer.py", test=f"exec python3 -I /tests/grade.py {onto}"
    )
    directory = written(root, plant)
    (directory / "tests" / "grade.py").write_text(grader.format(to=JSON))
    with (directory / "task.toml").open("a") as file:
        file.write(extra)
    return await run_attempt(directory)


async def test_grader_may_read_the_agents_sources_but_not_run_them_where_it_writes(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """To look at work is not to be led by it; a task may take the risk, and says so."""
    reads = await graded_by(run_attempt, tmp_path / "reads", READS)
    prints = await graded_by(run_attempt, tmp_path / "prints", PRINTS, onto=f"> {JSON}")
    imports = await graded_by(run_attempt, tmp_path / "imports", IMPORTS)
    becomes = await graded_by(run_attempt, tmp_path / "becomes", BECOMES)
    sheds = await graded_by(run_attempt, tmp_path / "sheds", SHEDS)
    declared = await graded_by(
        run_attempt, tmp_path / "declared", IMPORTS, 'agent_paths = ["/work"]\n'
    )

    assert verdict(reads) == 1.0, reads.failure
    assert verdict(prints) == 1.0, prints.failure
    for runs in (imports, becomes, sheds):
        assert runs.rewards is None
        assert runs.failure
        assert (runs.failure.side, runs.failure.code) == ("verifier", "reward_unvouched")
    assert imports.failure
    assert "/work/answer.py" in imports.failure.message
    assert "agent_paths" in imports.failure.message
    assert verdict(declared) == 1.0, declared.failure


def ends(pid: int) -> bool:
    """Whether a process ends within 10 s."""
    try:
        with closing(os.pidfd_open(pid)) as fd:
            return bool(select.select([fd], [], [], 10)[0])
    except ProcessLookupError:
        return True


@pytest.mark.parametrize(("grader", "onto"), [(READS, ""), (PRINTS, f"> {JSON}")])
async def test_grader_that_has_ended_before_it_is_judged_keeps_its_verdict(
    grader: str,
    onto: str,
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the node sees that a source was read when the reader is gone."""
    note, late = Ledger.note, []

    def note_late(self: Ledger, event: Event) -> None:
        if path_of(event.fd) == b"/work/answer.py" and not event.mask & OPEN_PERM:
            late.append(ends(event.pid))
        note(self, event)

    monkeypatch.setattr(Ledger, "note", note_late)
    trajectory = await graded_by(run_attempt, tmp_path, grader, onto=onto)

    assert verdict(trajectory) == 1.0, trajectory.failure
    assert late
    assert all(late)


async def test_mount_over_the_verifiers_directory_is_refused(
    native_async_client: AsyncSandboxClient, base: str
) -> None:
    """A bind mount would survive the removal of what lies below; the control is the same by cp."""
    async with await native_async_client.create_sandbox(base) as sandbox:
        plant = f"mkdir /tmp/m; echo 1 > /tmp/m/reward.json; mount --bind /tmp/m {DIR}"
        mounted = await sandbox.exec(plant, user=0)
        nested = await sandbox.exec(["unshare", "-rm", "true"], user=0)
        copied = await sandbox.exec(f"cp /tmp/m/reward.json {DIR}", user=0)

        assert not mounted.ok
        assert not nested.ok
        assert copied.ok
        assert await read_naively(sandbox) == "1"


async def test_root_survivor_that_keeps_undoing_what_we_make_is_killed_or_told(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A loop of mkdir must not turn a 0 into a failure that is nobody's."""
    loop = f"while :; do mkdir -p {DIR} /tests; rm -rf /tests; done"
    plant = Plant("for i in 1 2 3; do (" + loop + " > /dev/null 2>&1 &); done; sleep 0.1")
    trajectory = await run_attempt(written(tmp_path, plant))

    assert trajectory.rewards in ({"reward": 0.0}, None)
    if trajectory.rewards is None:
        assert trajectory.failure and trajectory.failure.code == "tampered"
