"""Harbor's own trials on our environment, and the same tasks by our own road: one truth."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldframe import SandboxClient
from coldframe.client import _calls
from coldframe.host.egress import steering
from coldframe.node.settings import NodeSettings
from coldframe.rollouts import scratch
from tests.fixtures.restart import Services, accounted
from tests.fixtures.service import serving
from tests.fixtures.waiting import wait_until
from tests.harbor.jobs import Outcome, Trial, roll_out, run_job
from tests.harbor.traps import BASE, IMAGE, TRAPS, Trap

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
SHIPPED = sorted(one.name for one in EXAMPLES.iterdir() if (one / "task.toml").is_file())


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs by our own road lie; both versions of Harbor in a lane are held to the same."""
    given = os.environ.get("COLDFRAME_HARBOR_TRUTH")
    return Path(given) if given else tmp_path_factory.mktemp("truth")


@contextmanager
def alone(truth: Path) -> Iterator[None]:
    """Let the other version in the lane wait for what is made once."""
    with (truth / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def traps(truth: Path) -> Path:
    """The directory of the traps."""
    directory = truth / "traps"
    with alone(truth):
        if not directory.exists():
            for name, trap in TRAPS.items():
                trap.write(directory, name)
    return directory


@pytest.fixture(scope="module")
def trapped(traps: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trial]:
    """Harbor's trials of them, in one job."""
    return run_job(traps, tmp_path_factory.mktemp("jobs"), agent={"name": "oracle"})


@pytest.fixture(scope="module")
def rolled_out(traps: Path, truth: Path) -> dict[str, Outcome]:
    """The same by `coldframe rollout run`."""
    with alone(truth):
        return roll_out(traps, truth / "of-traps", "oracle")


@pytest.mark.parametrize("name", sorted(TRAPS))
def test_trap_comes_to_the_same_by_both_roads(
    name: str, trapped: dict[str, Trial], rolled_out: dict[str, Outcome]
) -> None:
    """A reward that depends on the runner is no reward."""
    expected = TRAPS[name].outcome

    assert (rolled_out[name], trapped[name].outcome) == (expected, expected)


def test_logs_of_the_verifier_are_kept_with_and_without_a_verdict(
    trapped: dict[str, Trial],
) -> None:
    """Whoever wonders about a reward looks there first; only a reward that counts is there."""
    for name in ("writes-a-number", "writes-nan", "plants-json"):
        kept = trapped[name].directory / "verifier"
        rewards = {one.name for one in kept.glob("reward.*")}
        assert (kept / "test-stdout.txt").is_file()
        assert rewards == ({"reward.txt"} if TRAPS[name].outcome != "reward_invalid" else set())


def test_hostile_artifacts_stay_where_they_belong(trapped: dict[str, Trial]) -> None:
    """What an agent leaves is copied to this machine: no link of its leads elsewhere."""
    kept = trapped["graded-apart"].directory / "artifacts" / "srv"

    assert (kept / "tool").stat().st_mode & 0o777 == 0o750
    assert (kept / "disk.img").stat().st_size == (64 << 20) + 4
    assert (kept / "disk.img").stat().st_blocks < 4096
    assert {one.name for one in kept.iterdir()} == {"disk.img", "tool", "link"}


@pytest.mark.parametrize("agent", ["oracle", "nop"])
def test_shipped_tasks_come_to_the_same_by_both_roads(
    agent: str, truth: Path, tmp_path: Path
) -> None:
    """Every shipped task: 1 for the reference, 0 for nothing."""
    expected: dict[str, Outcome] = dict.fromkeys(SHIPPED, 1.0 if agent == "oracle" else 0.0)
    with alone(truth):  # their graders take what two processors give
        trials = run_job(EXAMPLES, tmp_path, agent={"name": agent})
        ours = roll_out(EXAMPLES, truth / agent, agent)

    assert {name: trial.outcome for name, trial in trials.items()} == expected
    assert ours == expected


def test_import_of_the_environment_is_light() -> None:
    """Harbor imports it in every command; litellm alone takes 9 s."""
    ended = subprocess.run(
        [sys.executable, "-c", "import coldframe.integrations.harbor, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(ended.stdout.split())

    assert not {"litellm", "torch", "kubernetes", "coldframe.host", "coldframe.node"} & loaded


def seen(trial: Trial) -> dict[str, Any]:
    """What a scripted agent has noted."""
    return dict(json.loads((trial.directory / "agent" / "seen.json").read_text()))


def run_one(tmp_path: Path, agent: str, trap: Trap, **kwargs: Any) -> Trial:
    """Run one task with one scripted agent."""
    trap.write(tmp_path / "tasks", "one")
    agent_of = {"import_path": f"tests.harbor.scripted:{agent}"}
    (trial,) = run_job(tmp_path / "tasks", tmp_path / "jobs", agent=agent_of, **kwargs).values()
    return trial


GOOD = Trap("true", "echo 1 > /logs/verifier/reward.txt", 1.0)


def test_every_end_of_a_command_is_a_return_code(tmp_path: Path) -> None:
    """A TimeoutError would be booked as the agent's own time-out, and end the trial."""
    trial = run_one(tmp_path, "Commands", GOOD)
    told = seen(trial)

    assert (trial.outcome, trial.result.exception_info) == (1.0, None)
    assert told["exit"] == [7, "out\n", "err\n"]
    assert told["bash"][0] == 0
    assert told["deadline"][:2] == [124, "before\n"]
    assert "deadline after 1 s" in told["deadline"][2]
    assert told["signal"][0] == 128 + 9
    not_started = ("no-user", "no-directory", "no-path", "no-text")
    assert {name: told[name][0] for name in not_started} == dict.fromkeys(not_started, 126)
    assert "nobody-at-all" in told["no-user"][2]
    assert told["where"] == [0, "/srv\nnobody\nb\n", ""]
    assert told["leaves"] == [0, "at once\n", ""]
    assert told["streamed"][:2] == [0, "aé"]
    assert told["streamed_text"] == "stderr:b\nstdout:aé"


def test_cancelled_agent_leaves_nothing_of_its_commands_for_the_verifier(tmp_path: Path) -> None:
    """Harbor grades in the same sandbox: what goes on there would be graded too."""
    test = (
        "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' > /logs/verifier/left; "
        "grep -qE 'sleep (7654|8765|6543)' /logs/verifier/left "
        "&& echo 0 > /logs/verifier/reward.txt || echo 1 > /logs/verifier/reward.txt"
    )
    trial = run_one(tmp_path, "Stalls", Trap("true", test, 1.0, agent_s=2.0))

    assert trial.result.exception_info.exception_type == "AgentTimeoutError"
    assert trial.outcome == 1.0, (trial.directory / "verifier" / "left").read_text()


def test_transfers_keep_modes_links_and_holes_and_leave_out_what_leads_away(
    tmp_path: Path,
) -> None:
    """An agent's directory is hostile, and so is what lies in it."""
    trial = run_one(tmp_path, "Transfers", GOOD)
    logs, told = trial.directory / "agent", seen(trial)
    hole, tool, twin, link = told["inside"].splitlines()

    assert (tool.split()[1], twin.split()[3]) == ("751", "2")
    assert int(hole.split()[2]) < 4096
    assert "'link' -> 'below/tool'" in link
    back = logs / "back"
    assert {one.name for one in back.iterdir()} == {"below", "link", "twin", "hole"}
    assert (back / "below" / "tool").read_text() == "x"
    assert (back / "link").readlink() == Path("below/tool")
    assert (back / "hole").stat().st_size == 1 << 30
    assert (back / "hole").stat().st_blocks < 4096
    assert (logs / "file" / "tool").stat().st_mode & 0o777 == 0o751
    assert {one.name for one in (logs / "some").iterdir()} == {"link", "twin", "hole"}
    assert {one.name for one in (logs / "chosen").rglob("*")} == {"below", "tool"}
    assert told["kinds"] == [True, False, True, False]


def test_environment_that_is_started_again_leaves_no_sandbox_behind(tmp_path: Path) -> None:
    """Nobody would end the first: its lease would be renewed for as long as Harbor runs."""
    trial = run_one(tmp_path, "StartsAgain", GOOD)

    assert (trial.outcome, seen(trial)) == (1.0, {"first": "gone"})


def test_sandbox_that_dies_is_told_as_what_it_is(tmp_path: Path) -> None:
    """An eviction that becomes a 0 trains against the agent."""
    trial = run_one(tmp_path, "Loses", GOOD)

    assert trial.outcome == "sandbox_gone"
    assert trial.result.verifier_result is None


def test_refused_tasks_leave_their_siblings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harbor ends the whole job at an exception in a constructor."""
    monkeypatch.setattr(steering, "refusal", lambda: "this kernel has no sk_lookup")
    tasks = tmp_path / "tasks"
    public = BASE.replace('"no-network"', '"public"')
    GOOD.write(tasks, "good")
    GOOD.write(tasks, "opens-for-the-agent")
    edited = tasks / "opens-for-the-agent" / "task.toml"
    edited.write_text(edited.read_text().replace("[agent]", '[agent]\nnetwork_mode = "public"'))
    said = {**vars(GOOD), "name": "public"}
    (GOOD.write(tasks, "public") / "task.toml").write_text(public.format(**said))
    replace(GOOD, environment=f"{IMAGE}\ngpus = 1").write(tasks, "gpus")
    replace(GOOD, environment="", files={"environment/docker-compose.yaml": "services: {}"}).write(
        tasks, "composed"
    )
    trials = run_job(tasks, tmp_path / "jobs", agent={"name": "oracle"})

    assert trials.pop("good").outcome == 1.0
    assert {name: trial.outcome for name, trial in trials.items()} == dict.fromkeys(
        ("public", "opens-for-the-agent", "gpus", "composed"), "capability_missing"
    )
    assert "sk_lookup" in trials["public"].result.exception_info.exception_message


def test_start_that_failed_is_the_only_failure_that_is_told(tmp_path: Path) -> None:
    """Harbor fetches logs of a sandbox that never was: that must not bury why there is none."""
    missing = replace(GOOD, environment='docker_image = "no-such-image"')
    missing.write(tmp_path / "tasks", "missing")
    (trial,) = run_job(tmp_path / "tasks", tmp_path / "jobs", agent={"name": "oracle"}).values()

    said = (trial.directory / "trial.log").read_text()
    assert trial.outcome == "image_not_found"
    assert "Failed to download logs" not in said
    manifest = trial.directory / "artifacts" / "manifest.json"
    assert not manifest.exists() or '"ok"' not in manifest.read_text()


def test_verifier_of_another_kind_finds_its_tests_and_emptied_places(tmp_path: Path) -> None:
    """A judge runs commands of its own: it is on its own, but not on what an agent planted."""
    test = "[ -e /logs/verifier/planted ] || echo 0.5 > /logs/verifier/reward.txt"
    trap = Trap("mkdir -p /logs/verifier; touch /logs/verifier/planted", test, 0.5)
    trap.write(tmp_path / "tasks", "one")
    (trial,) = run_job(
        tmp_path / "tasks",
        tmp_path / "jobs",
        agent={"name": "oracle"},
        verifier="tests.harbor.scripted:OwnVerifier",
    ).values()

    assert trial.outcome == 0.5


def test_policy_changes_with_the_phase(tmp_path: Path) -> None:
    """What the agent may reach, its verifier may not, and the other way round."""
    probe = "exec 3<>/dev/tcp/127.0.0.53/3128"
    trap = Trap(
        f"({probe}) 2>/dev/null && touch /root/open",
        f"[ -e /root/open ] && ! ({probe}) 2>/dev/null && echo 1 > /logs/verifier/reward.txt",
        1.0,
        agent='network_mode = "allowlist"\nallowed_hosts = ["files.example"]',
    )
    trap.write(tmp_path / "tasks", "one")
    (trial,) = run_job(tmp_path / "tasks", tmp_path / "jobs", agent={"name": "oracle"}).values()

    assert trial.outcome == 1.0


KILLED = """
import sys
from pathlib import Path
from tests.harbor.jobs import run_job
run_job(Path(sys.argv[1]), Path(sys.argv[2]), agent={"import_path": "tests.harbor.scripted:Kills"},
        concurrency=20, attempts=20, lease_s=4.0)
"""
IMAGES = NodeSettings.from_environment().home / "images"


def kill_harbor(tmp_path: Path, **environment: str) -> None:
    """Have a Harbor killed in the middle of 20 trials."""
    GOOD.write(tmp_path / "tasks", "one")
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "tasks"), str(tmp_path / "jobs")],
        env=os.environ | {"COLDFRAME_TEST_KILL_AT": "20"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == -9, ended.stderr


def test_killed_harbor_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL defeats every teardown: what a node in its process had ends with it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "images").symlink_to(IMAGES)
    kill_harbor(tmp_path, COLDFRAME_HOME=str(home))

    def ledger() -> dict[str, Any]:
        command = [sys.executable, "-m", "coldframe.cli.main"]
        environment = os.environ | {"COLDFRAME_HOME": str(home)}
        subprocess.run([*command, "gc"], env=environment, check=True, capture_output=True)
        told = subprocess.run(
            [*command, "ledger", "--json"], env=environment, capture_output=True, check=False
        )
        return dict(json.loads(told.stdout))

    wait_until(lambda: ledger()["balanced"], within_s=30)
    found = ledger()
    assert (found["balanced"], found["live"], found["leaked"], found["lost"]) == (True, 0, 0, 20)


GRADED = """
import sys
from pathlib import Path
from tests.harbor.jobs import run_job
(trial,) = run_job(Path(sys.argv[1]), Path(sys.argv[2]), agent={"name": "oracle"},
                   verifier="tests.harbor.scripted:KillsWhileGrading").values()
print(trial.outcome)
"""


def test_harbor_killed_while_it_grades_leaves_no_tests_and_no_files_of_the_sandbox(
    tmp_path: Path,
) -> None:
    """What it holds on this machine, hidden tests among it, goes by gc and with the next start."""
    GOOD.write(tmp_path / "tasks", "one")
    (home := tmp_path / "home").mkdir()
    (home / "images").symlink_to(IMAGES)
    (elsewhere := tmp_path / "tmp").mkdir()
    jobs = tmp_path / "jobs"
    environment = os.environ | {"COLDFRAME_HOME": str(home), "TMPDIR": str(elsewhere)}

    def graded(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", GRADED, str(tmp_path / "tasks"), str(jobs)],
            env=environment | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    killed = graded()
    kept, fetched = list(elsewhere.rglob("test.sh")), list(jobs.rglob(f"{scratch.PREFIX}*"))
    gc = [sys.executable, "-m", "coldframe.cli.main", "gc", "--json"]
    told = json.loads(subprocess.run(gc, env=environment, capture_output=True, check=True).stdout)
    again = graded(COLDFRAME_TEST_SPARE="1")

    assert killed.returncode == -9, killed.stderr
    assert (len(kept), len(fetched)) == (1, 1)
    assert f"scratch {kept[0].parent}" in told["reaped"]
    assert told["remaining"] == []
    assert again.stdout.splitlines()[-1:] == ["1.0"], again.stderr
    assert list(jobs.rglob(f"{scratch.PREFIX}*")) == []
    assert list(elsewhere.iterdir()) == []


def test_sandboxes_of_a_killed_harbor_end_with_their_lease(tmp_path: Path) -> None:
    """A service outlives Harbor, and would keep its sandboxes: 387 stale ones were found once."""
    with serving(tmp_path, "native", images=IMAGES, COLDFRAME_QUARANTINE_S="1") as service:
        kill_harbor(tmp_path, COLDFRAME_URL=service.unix)
        with SandboxClient(url=service.unix) as client:
            assert len(client.list_sandboxes()) == 20
            wait_until(lambda: not client.list_sandboxes())
            found = client.ledger()
    assert (found.live, found.leaked, found.expired, found.balanced) == (0, 0, 20, True)


def test_node_that_is_killed_in_the_middle_of_a_trial_is_told_and_the_trial_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is nobody's 0; what the dead node had lives on with its spawner, and ends by its lease."""
    monkeypatch.setattr(_calls, "_RESTART_S", 0.0)  # no other comes meanwhile
    with accounted(Services(tmp_path, IMAGES, COLDFRAME_QUARANTINE_S="1")) as services:
        monkeypatch.setenv("COLDFRAME_TEST_NODE", str(services.start().pid))
        where: dict[str, Any] = {"url": services.url, "lease_s": 4.0}
        lost = run_one(tmp_path, "LosesItsNode", GOOD, **where)
        services.kill()
        services.start()
        with services.client() as client:
            wait_until(lambda: not client.list_sandboxes())
        (again,) = run_job(
            tmp_path / "tasks", tmp_path / "again", agent={"name": "oracle"}, **where
        ).values()
        with services.client() as client:
            found = client.ledger()

    assert lost.outcome == "service_unreachable"
    assert lost.result.verifier_result is None
    assert again.outcome == 1.0
    assert (found.live, found.leaked, found.balanced) == (0, 0, True)


def test_file_that_became_a_directory_with_a_link_in_it_is_refused(tmp_path: Path) -> None:
    """Somebody in the sandbox may change it between a look and the copy; a link that is kept within
    its own directory leads elsewhere on this machine."""
    from coldframe.integrations.harbor import transfers
    from coldframe.protocol.errors import PathRefusedError
    from coldframe.protocol.models import FileKind

    class FakeFiles:
        async def stat(self, path: str) -> Any:
            return SimpleNamespace(kind=FileKind.FILE)

        async def download_tree(self, path: str, local: Path, *, on_refused: Any) -> int:
            await asyncio.to_thread(local.mkdir)
            await asyncio.to_thread((local / "log").symlink_to, "result.json")
            return 1

    (tmp_path / "result.json").write_text("ours")
    sandbox: Any = SimpleNamespace(files=FakeFiles())
    with pytest.raises(PathRefusedError, match="'/logs/log' is no regular file"):
        asyncio.run(
            transfers.download_file(sandbox, "/logs/log", tmp_path / "log", logging.getLogger())
        )
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]
