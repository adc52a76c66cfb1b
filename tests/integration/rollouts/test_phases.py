"""Phases of an attempt: users, network policies, what is visible, and what each leaves behind."""

from __future__ import annotations

import asyncio
import errno
import stat
from pathlib import Path

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.host import fanotify
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.rollouts import phases
from coldframe.trajectories.phases import PhaseRecord
from coldframe.trajectories.schema import Trajectory
from tests.fixtures.egress import OTHER, WEB, Internet, hello
from tests.fixtures.waiting import until_asked
from tests.integration.rollouts.conftest import RunAttempt, all_begun
from tests.integration.rollouts.test_boot import Tagged, tagged  # noqa: F401 (a fixture)
from tests.unit.rollouts.tasks import BASE, write_files, write_task

pytestmark = pytest.mark.root
REWARD = "/logs/verifier/reward.txt"
TRY = (
    "import socket, sys\n"
    "def reach(address):\n"
    "    try:\n"
    "        with socket.create_connection((address, 7), timeout=5) as c:\n"
    "            return c.recv(6) == b'hello\\n'\n"
    "    except OSError:\n"
    "        return False\n"
)


def network_task(root: Path, *, agent: str = "", verifier: str = "", **files: str) -> Path:
    toml = BASE + f"[agent]\n{agent}\n[verifier]\n{verifier}\n"
    return write_task(root, toml=toml, **files)


def phase(trajectory: Trajectory, name: str) -> PhaseRecord:
    (found,) = [one for one in trajectory.phases if one.name == name]
    return found


async def test_phases_have_a_policy_each_and_their_decisions_are_in_the_record(
    internet: Internet, run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """An agent that looks for the answer outside is seen doing it; a verifier has its own way."""
    await internet.serve(WEB, 7, hello)
    await internet.serve(OTHER, 7, hello)
    seen = f"print(reach('{WEB}'), reach('{OTHER}'))\n"
    directory = network_task(
        tmp_path,
        agent=f'user = "nobody"\nnetwork_mode = "allowlist"\nallowed_hosts = ["{WEB}"]',
        verifier=f'network_mode = "allowlist"\nallowed_hosts = ["{OTHER}"]',
        solution__solve_sh=f"#!/usr/bin/python3\n{TRY}open('/tmp/agent', 'w').write("
        f"f\"{{reach('{WEB}')}} {{reach('{OTHER}')}}\")\n",
        tests__test_sh=f"#!/usr/bin/python3\n{TRY}{seen}"
        f"ok = (reach('{WEB}'), reach('{OTHER}')) == (False, True)\n"
        "ok = ok and open('/tmp/agent').read() == 'True False'\n"
        f"open('{REWARD}', 'w').write(str(int(ok)))\n",
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    start, agent, verify = trajectory.phases
    assert (start.name, start.network) == ("start", ())
    assert (agent.user, agent.network, agent.visible) == ("nobody", (WEB,), ())
    assert (verify.user, verify.network) == ("0", (OTHER,))
    assert verify.visible == ("/tests", "/logs/verifier")
    assert start.ended_at <= agent.started_at <= agent.ended_at <= verify.started_at
    counts = agent.egress.counts
    assert (counts["tcp.allowed"], counts["tcp.refused"]) == (1, 1)
    refused = [one for one in agent.egress.events if one.decision == "refused"]
    assert [(one.address, one.port, one.step) for one in refused] == [(OTHER, 7, 0)]
    ways = [one for one in verify.egress.events if one.kind == "tcp"]
    allowed = [one for one in ways if one.decision == "allowed"]
    assert {one.address for one in allowed} == {OTHER}
    assert {one.step for one in verify.egress.events} == {None}


async def test_change_of_phase_cuts_the_connections_of_what_lives_on(
    internet: Internet, run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A service may survive its agent; its way out must not."""
    await internet.serve(WEB, 7, hello)
    service = (
        f"{TRY}import time\nc = socket.create_connection(('{WEB}', 7)); c.recv(6)\n"
        "open('/tmp/up', 'w').close()\n"
        "try:\n    got = c.recv(1)\nexcept OSError:\n    got = b''\n"
        f"open('/tmp/cut', 'w').write(f\"{{got}} {{reach('{WEB}')}}\"); time.sleep(1000)\n"
    )
    directory = network_task(
        tmp_path,
        agent=f'network_mode = "allowlist"\nallowed_hosts = ["{WEB}"]',
        solution__solve_sh="#!/bin/sh\npython3 /solution/service.py > /dev/null 2>&1 &\n"
        "until [ -e /tmp/up ]; do sleep 0.01; done\n",
        solution__service_py=service,
        tests__test_sh="#!/bin/sh\nfor i in $(seq 500); do [ -s /tmp/cut ] && break; sleep 0.01; "
        f'done\n[ "$(cat /tmp/cut)" = "b\'\' False" ] && echo 1 > {REWARD}\n',
    )
    (directory / "solution" / "service_py").rename(directory / "solution" / "service.py")
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    agent, verify = phase(trajectory, "agent"), phase(trajectory, "verify")
    assert [one.name for one in agent.survivors] == ["python3"]
    assert [one.name for one in verify.killed] == ["python3"]
    every = [*agent.egress.events, *verify.egress.events]
    assert "cut" in {one.decision for one in every}


async def test_decisions_beyond_the_bound_are_counted_and_said_to_be_left_out(
    internet: Internet,
    run_attempt: RunAttempt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scan of a whole network must not make a record that nobody can load."""
    monkeypatch.setattr(phases, "MAX_EVENTS", 10)
    monkeypatch.setattr(phases, "PAGE", 7)
    directory = network_task(
        tmp_path,
        agent=f'network_mode = "allowlist"\nallowed_hosts = ["{WEB}"]',
        solution__solve_sh=f"#!/usr/bin/python3\n{TRY}for i in range(50):\n    reach('{OTHER}')\n",
    )
    trajectory = await run_attempt(directory)

    egress = phase(trajectory, "agent").egress
    refused = egress.counts["tcp.refused"]
    assert refused == 50
    assert len(egress.events) == 10
    assert egress.left_out == sum(egress.counts.values()) - 10
    assert egress.lost == 0


async def test_secret_in_a_name_that_was_asked_for_is_not_in_the_record(
    internet: Internet, run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Names are the agent's words, and may carry what it should not have told."""
    toml = BASE + (
        'env = { API_KEY = "tell-nobody-1" }\n'
        '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["mirror.example"]\n'
    )
    directory = write_task(
        tmp_path,
        toml=toml,
        solution__solve_sh="#!/bin/sh\ngetent hosts $API_KEY.mirror.example\nexit 0\n",
    )
    trajectory = await run_attempt(directory)

    asked = [one.name for one in phase(trajectory, "agent").egress.events if one.kind == "dns"]
    assert "[redacted].mirror.example" in asked
    assert "tell-nobody-1" not in trajectory.model_dump_json()


async def test_policy_of_a_phase_that_cannot_be_enforced_fails_by_name(
    run_attempt: RunAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graded without what its author gave it, a task would teach the wrong thing."""
    from coldframe.host.egress.steering import Steering

    def refuse(self: Steering, *args: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Steering, "attach", refuse)
    directory = network_task(tmp_path, verifier='network_mode = "public"')
    trajectory = await run_attempt(directory)

    assert trajectory.rewards is None
    assert trajectory.failure and trajectory.failure.code == "capability_missing"
    assert trajectory.failure.phase == "verify"


def no_fanotify() -> None:
    raise OSError(errno.ENOSYS, "no such call")


async def test_entry_point_lives_through_every_phase_and_casts_no_doubt_on_the_verdict(
    run_attempt: RunAttempt,
    tagged: Tagged,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service of the image's is no survivor of the agent's; one of the agent's is."""
    image = tagged(("sh", "-c", "exec sleep 5000"))
    toml = f'[environment]\ndocker_image = "{image}"\nnetwork_mode = "no-network"\n'
    toml += "[environment.healthcheck]\n"
    toml += 'command = "pgrep -x sleep"\ninterval_sec = 0.1\n'
    test = f"#!/bin/sh\npgrep -f 'sleep 5000' && echo 1 > {REWARD}\n"
    monkeypatch.setattr(fanotify, "Listener", no_fanotify)
    own = await run_attempt(write_task(tmp_path, "own", toml=toml, tests__test_sh=test))
    left = "#!/bin/sh\nsleep 6000 > /dev/null 2>&1 &\n"
    more = await run_attempt(
        write_task(tmp_path, "more", toml=toml, tests__test_sh=test, solution__solve_sh=left)
    )

    assert (own.rewards, more.rewards) == ({"reward": 1.0}, {"reward": 1.0}), own.failure
    assert own.verification and more.verification
    assert (own.verification.forgeable, more.verification.forgeable) == (False, True)
    assert not (own.verification.guarded or more.verification.guarded)


async def test_what_an_agent_left_gets_no_wider_network_while_the_next_step_is_set_up(
    internet: Internet, run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """It would fetch the answer for the next agent. Before the first one the baseline holds."""
    await internet.serve(OTHER, 7, hello)
    setup = f"#!/usr/bin/python3\n{TRY}import time\nreached = reach('{OTHER}')\ntime.sleep(0.3)\n"
    setup += "open('/tmp/setup', 'a').write(f'{reached} ')\n"
    loop = f"#!/usr/bin/python3\n{TRY}import os, time\nif os.fork():\n    sys.exit()\nos.setsid()\n"
    loop += "null = os.open('/dev/null', os.O_RDWR)\nfor n in range(3):\n    os.dup2(null, n)\n"
    loop += f"while not reach('{OTHER}'):\n    time.sleep(0.02)\nopen('/tmp/fetched', 'w')\n"
    test = '#!/bin/sh\n[ ! -e /tmp/fetched ] && [ "$(cat /tmp/setup)" = "$1" ] '
    contents = {
        "task.toml": BASE.replace('"no-network"', f'"allowlist"\nallowed_hosts = ["{OTHER}"]')
        + '[agent]\nuser = "nobody"\nnetwork_mode = "no-network"\n'
        '[verifier]\nnetwork_mode = "no-network"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n',
        "steps/a/solution/solve.sh": loop,
        "steps/b/solution/solve.sh": "#!/bin/sh\ntrue\n",
    }
    for step, known in (("a", "True "), ("b", "True False ")):
        contents[f"steps/{step}/instruction.md"] = "Do it.\n"
        contents[f"steps/{step}/workdir/setup.sh"] = setup
        contents[f"steps/{step}/tests/test.sh"] = (
            test.replace("$1", known) + f"&& echo 1 > {REWARD}\n"
        )
    toml = contents["task.toml"]
    contents["task.toml"] = toml.replace("[environment]\n", '[environment]\nworkdir = "/tmp"\n')
    trajectory = await run_attempt(write_files(tmp_path / "task", contents))

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    starts = [one.network for one in trajectory.phases if one.name == "start"]
    assert starts == [(OTHER,), (OTHER,), ()]


@pytest.mark.parametrize(
    ("agent", "verifier", "forgeable"),
    [("nobody", "nobody", True), ("nobody", "65534", True), ("nobody", "daemon", False)],
)
async def test_survivor_of_the_verifiers_own_user_casts_doubt_on_the_verdict(
    run_attempt: RunAttempt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: str,
    verifier: str,
    forgeable: bool,
) -> None:
    """Where nothing can be guarded, the verifier's user may write its reward, root or not."""
    monkeypatch.setattr(fanotify, "Listener", no_fanotify)
    one = await run_attempt(
        write_task(
            tmp_path,
            toml=f'{BASE}[agent]\nuser = "{agent}"\n[verifier]\nuser = "{verifier}"\n',
            tests__test_sh=f"#!/bin/sh\necho 1 > {REWARD}\n",
            solution__solve_sh="#!/bin/sh\nsleep 6000 > /dev/null 2>&1 &\n",
        )
    )

    assert one.verification, one.failure
    assert one.verification.forgeable is forgeable


async def test_build_is_a_phase_with_the_policy_of_its_steps(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """What installs packages reaches their indexes, whatever the agent may; it is not the agent."""
    directory = write_task(
        tmp_path,
        toml='[environment]\nnetwork_mode = "no-network"\n',
        environment__Dockerfile="FROM debian:bookworm\nRUN id -u > /built-by\n",
        solution__solve_sh="#!/bin/sh\ngrep -qx 0 /built-by\n",
    )
    build, _, agent, _ = (await run_attempt(directory)).phases

    assert (build.name, build.user, build.network) == ("build", "root", ("presets:apt,npm,pip",))
    assert (agent.name, agent.network) == ("agent", ())


async def test_phase_whose_sandbox_died_says_that_its_decisions_are_lost(
    run_attempt: RunAttempt, native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """Nothing asked for, and nobody could tell, must not look alike."""
    directory = network_task(tmp_path, solution__solve_sh="#!/bin/sh\ntouch /begun; sleep 1000\n")
    running = asyncio.create_task(run_attempt(directory))
    await until_asked(lambda: all_begun(native_async_client, 1))
    (sandbox,) = await native_async_client.list_sandboxes()
    await sandbox.delete()
    trajectory = await running

    assert [one.name for one in trajectory.phases] == ["start", "agent"]
    assert "phases.1.egress" in trajectory.unknown
    assert "phases.0.egress" not in trajectory.unknown


async def test_program_whose_file_another_image_touches_is_not_called_changed(
    run_attempt: RunAttempt,
    native_async_client: AsyncSandboxClient,
    image_store: ImageStore,
    debian_image: Image,
    tmp_path: Path,
) -> None:
    """Layers are shared: an import links their files, and their times change for everybody."""
    slow = "#!/bin/sh\ntouch /begun; until [ -e /go ]; do sleep 0.02; done\n"
    test = f"#!/bin/sh\necho 1 > {REWARD}\n"
    running = asyncio.create_task(
        run_attempt(write_task(tmp_path, solution__solve_sh=slow, tests__test_sh=test))
    )
    await until_asked(lambda: all_begun(native_async_client, 1))
    shell = image_store.layer_root(debian_image.layers[0]) / "usr" / "bin" / "dash"
    before = shell.stat().st_ctime_ns
    shell.chmod(stat.S_IMODE(shell.stat().st_mode))
    (sandbox,) = await native_async_client.list_sandboxes()
    await sandbox.files.write("/go", b"")
    trajectory = await running

    assert shell.stat().st_ctime_ns > before
    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    assert trajectory.tamper == ()
