"""The commands as a user runs them: real processes, killed and interrupted for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from coldframe.rollouts.directory import RunDirectory
from coldframe.trajectories.store import read_trajectory
from tests.doubles.model_endpoint import Bash, ModelEndpoint, Reply, Say
from tests.integration.rollouts.test_attempt import make_task
from tests.integration.rollouts.test_steps import steps_task
from tests.unit.rollouts.tasks import BASE, write_task

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("debian_image")]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tasks"


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "coldframe.cli.main", *map(str, words)]


def coldframe(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Return when the path is there; a process that ended before is a failure."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def scripted_solution(task: str) -> list[Reply]:
    """A policy that looks, writes the reference, checks and says that it is done."""
    solution = (EXAMPLES / task / "solution" / "solve.sh").read_text()
    return [
        Bash("pwd; ls -la", "cat /etc/os-release | head -1"),
        Bash(f"cat > /tmp/solve.sh <<'END-OF-SCRIPT'\n{solution}\nEND-OF-SCRIPT\nsh /tmp/solve.sh"),
        Say("It is done."),
    ]


def test_rollout_run_with_react_solves_two_shipped_tasks(tmp_path: Path) -> None:
    """The whole main job over the real HTTP API, from the command line to the table."""
    names = ("recover-binary-log", "switch-to-grams")
    scripts = {name: scripted_solution(name) for name in names}
    words = {"recover-binary-log": "/srv/store", "switch-to-grams": "/srv/shop"}
    with ModelEndpoint({words[name]: script for name, script in scripts.items()}) as endpoint:
        done = coldframe(
            "rollout", "run", *(EXAMPLES / name for name in names), "--harness", "react",
            "--model", "policy", "--base-url", endpoint.base_url, "--api-key-env", "SCRIPTED_KEY",
            "--out", tmp_path / "out", "--json", SCRIPTED_KEY="sk-scripted-1",
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert {key: task["passes"] for key, task in summary["tasks"].items()} == dict.fromkeys(
        names, 1
    )
    shown = coldframe("rollout", "show", tmp_path / "out", "--json")
    assert json.loads(shown.stdout)["summary"] == summary
    assert "recover-binary-log.0.0" in shown.stdout
    steps = coldframe("rollout", "show", tmp_path / "out", "--attempt", "switch-to-grams.0.0")
    assert "step 2  model" in steps.stdout
    assert "files: +0 ~0 -0" in steps.stdout
    assert "\n  > " in steps.stdout  # a command of several lines
    assert "\n  : " in steps.stdout  # what the model said beside its calls
    assert "reward = 1" in steps.stdout


def test_rollout_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL gives no chance to tidy up: what is on disk must do."""
    task = make_task(tmp_path, solution__solve_sh="#!/bin/sh\nsleep 0.3; touch /done\n")
    out = tmp_path / "out"
    words = ("rollout", "run", task, "--harness", "oracle", "--samples", 6, "--out", out)
    with subprocess.Popen(
        command(*words, "--concurrency", 2), text=True, stderr=subprocess.PIPE
    ) as process:
        wait_for(out / "attempts" / "one.1.0" / "trajectory.json", process)
        process.send_signal(signal.SIGKILL)
    kept = {key: one.identity.trace_id for key, one in RunDirectory(out).results().items()}

    again = coldframe(*words, "--resume", "--json")

    assert 1 <= len(kept) < 6
    assert again.returncode == 0, again.stderr
    assert f"resuming: {len(kept)} of 6" in again.stderr
    results = RunDirectory(out).results()
    assert len(results) == 6
    assert {key: results[key].identity.trace_id for key in kept} == kept


def test_killed_run_leaves_its_spool_with_the_run_and_not_in_tmp(tmp_path: Path) -> None:
    """A gibibyte of artifacts per killed attempt would fill the machine's /tmp."""
    task = make_task(
        tmp_path,
        solution__solve_sh="#!/bin/sh\necho kept > /logs/artifacts/a; touch /done\n",
        tests__test_sh="#!/bin/sh\nsleep 1\n[ -e /done ] && echo 1 > /logs/verifier/reward.txt\n",
    )
    out, elsewhere = tmp_path / "out", tmp_path / "tmp"
    elsewhere.mkdir()
    words = ("rollout", "run", task, "--harness", "oracle", "--out", out)
    with subprocess.Popen(
        command(*words),
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(elsewhere)},
    ) as process:
        wait_for(out / "attempts" / "one.0.0" / "artifacts", process)
        process.send_signal(signal.SIGKILL)
    left = list(out.rglob(".artifacts.*"))
    again = coldframe(*words, "--resume")

    assert [one.parent for one in left] == [out / "blobs"]
    assert list(elsewhere.iterdir()) == []
    assert again.returncode == 0, again.stderr
    assert list(out.rglob(".artifacts.*")) == []


def test_rollout_run_of_several_steps_goes_on_after_a_kill_and_is_shown(tmp_path: Path) -> None:
    """An attempt that died in its second step is made again from its first."""
    task = steps_task(
        tmp_path,
        one={},
        two={
            "solution/solve.sh": "#!/bin/sh\nsleep 0.3; touch /two\n",
            "tests/test.sh": "#!/bin/sh\nmkdir -p /logs/artifacts; echo >> /tests/test.sh\n"
            "echo 1 > /logs/verifier/reward.txt\n",
        },
    )
    toml = (task / "task.toml").read_text()
    out = tmp_path / "out"
    words = ("rollout", "run", task, "--harness", "oracle", "--samples", 3, "--out", out)
    with subprocess.Popen(
        command(*words, "--concurrency", 1), text=True, stderr=subprocess.PIPE
    ) as process:
        wait_for(out / "attempts" / "steps-task.0.0" / "trajectory.json", process)
        process.send_signal(signal.SIGKILL)
    again = coldframe(*words, "--resume")
    shown = coldframe("rollout", "show", out, "--attempt", "steps-task.2.0")
    summary = json.loads((out / "summary.json").read_text())

    assert "[[steps]]" in toml
    assert again.returncode == 1, again.stderr
    results = RunDirectory(out).results()
    assert len(results) == 3
    assert {one.failure and one.failure.code for one in results.values()} == {"tampered"}
    assert "task step one  finished  reward = 1" in shown.stdout
    assert "task step two  finished  failure tampered" in shown.stdout
    phases = [line for line in shown.stdout.splitlines() if line.startswith("phase ")]
    assert any(line.startswith("phase agent of two") for line in phases)
    assert all("  as root" in line or "  as the image's user" in line for line in phases), phases
    assert "tamper: tests_changed: test.sh:" in shown.stdout
    found = summary["tasks"]["steps-task"]
    assert found["tamper"] == {"attempts": 3, "voided": 3, "forgeable": 0}
    assert [step["verdicts"] for step in found["steps"].values()] == [3, 0]
    assert "3 attempts tampered with (3 void)" in again.stdout
    assert "step one: 3 verdicts, mean 1" in again.stdout
    table = again.stdout.removesuffix(f"\n\n{out}\n")
    assert "phases, in s: start" in table
    assert coldframe("rollout", "show", out).stdout.endswith(f"\n{table}\n")


def test_rollout_run_keeps_artifacts_beside_the_trajectory(tmp_path: Path) -> None:
    """Where a user looks for what the agent made."""
    task = make_task(tmp_path, solution__solve_sh="#!/bin/sh\necho made > /logs/artifacts/it\n")
    out = tmp_path / "out"
    coldframe("rollout", "run", task, "--harness", "oracle", "--out", out)

    kept = out / "attempts" / "one.0.0" / "artifacts" / "logs" / "artifacts.tar"
    with tarfile.open(kept) as archive:
        assert archive.getnames() == ["it"]
    shown = coldframe("rollout", "show", out, "--attempt", "one.0.0")
    assert "1 artifacts of" in shown.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rollout_run_that_is_interrupted_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Both the user's Ctrl-C and a scheduler's SIGTERM end it cleanly."""
    task = make_task(tmp_path, solution__solve_sh="#!/bin/sh\nsleep 1000\n")
    out = tmp_path / "out"
    with subprocess.Popen(
        command("rollout", "run", task, "--harness", "oracle", "--out", out),
        text=True,
        stderr=subprocess.PIPE,
    ) as process:
        wait_for(out / "blobs", process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    assert f"--out {out} --resume" in stderr
    assert json.loads((out / "summary.json").read_text())["interrupted"]


def test_rollout_run_exit_code_says_whether_all_ended_in_a_verdict(tmp_path: Path) -> None:
    """A script must be able to tell without reading the results."""
    good = make_task(tmp_path, "good")
    crashing = make_task(tmp_path, "crashing", tests__test_sh="#!/bin/sh\nexit 1\n")
    refused = write_task(tmp_path, "refused", toml=BASE + "gpus = 1\n")

    def run(*tasks: Path, out: str) -> subprocess.CompletedProcess[str]:
        return coldframe("rollout", "run", *tasks, "--harness", "nop", "--out", tmp_path / out)

    verdicts, failed = run(good, out="a"), run(good, crashing, out="b")
    partly = run(good, refused, out="c")

    assert (verdicts.returncode, failed.returncode, partly.returncode) == (0, 1, 1)
    assert "verifier failure reward_missing" in failed.stderr
    said = partly.stderr + partly.stdout
    assert said.count("[environment] gpus = 1 is not honoured yet") == 1, "one cause, one line"
    assert "good" in partly.stdout
    assert "1 attempts, 0 failed; 1 tasks refused" in partly.stdout
    assert "\x1b[" not in partly.stdout + partly.stderr


def test_rollout_run_on_a_changed_configuration_names_it(tmp_path: Path) -> None:
    """One clear sentence, exit code of the caller's own mistakes, nothing lost."""
    task = make_task(tmp_path)
    words = ("rollout", "run", task, "--harness", "nop", "--out", tmp_path / "out")
    assert coldframe(*words).returncode == 0

    changed = coldframe(*words, "--samples", 2)

    assert changed.returncode == 2
    assert "samples: 1 is now 2" in changed.stderr
    assert len(RunDirectory(tmp_path / "out").results()) == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--harness", "absent"), "absent"),
        (("--harness", "react"), "--model"),
        (("--harness", "nop", "--samples", "0"), "samples"),
        (("--harness", "nop", "--steps", "-1"), "steps"),
        (("--harness", "nop", "--resume", "--out", "/nowhere/run"), "/nowhere/run"),
        (("--harness", "react", "--model", "m", "--base-url", "ftp://x"), "ftp://x"),
        (("--model", "m", "--base-url", "http://x", "--api-key-env", "UNSET_1"), "UNSET_1"),
    ],
)  # fmt: skip
def test_rollout_run_with_a_bad_word_names_it(
    tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    """Each mistake gives one sentence and starts nothing."""
    done = coldframe("rollout", "run", make_task(tmp_path), *words)

    assert done.returncode == 2
    assert name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_rollout_show_of_what_is_no_run_says_so(tmp_path: Path) -> None:
    """Not a traceback, whatever the directory is."""
    done = coldframe("rollout", "show", tmp_path)

    assert done.returncode == 2
    assert "not a run" in done.stderr


def test_task_check_tells_honest_tasks_from_others(tmp_path: Path) -> None:
    """A task that passes with nothing done, or with a wrong solution, teaches nonsense."""
    wrong = {"wrong__a__solve_sh": "#!/bin/sh\ntouch /nearly\n"}
    honest = make_task(tmp_path, "honest", **wrong)
    lax = make_task(
        tmp_path, "lax", tests__test_sh="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n", **wrong
    )
    good = coldframe("task", "check", honest, "--times", 2, "--json")
    bad = coldframe("task", "check", lax, "--times", 1)
    mute = make_task(tmp_path, "mute", tests__test_sh="#!/bin/sh\nexit 0\n", **wrong)
    none = coldframe("task", "check", mute, "--times", 2)

    assert good.returncode == 0, good.stderr
    (report,) = json.loads(good.stdout.splitlines()[-1])["tasks"]
    assert {name: one["as_expected"] for name, one in report["contenders"].items()} == {
        "oracle": 2,
        "nop": 2,
        "wrong/a": 2,
    }
    assert bad.returncode == 1
    assert "problem: lax: nop, run 0; wrong/a, run 0: passed with" in bad.stdout
    assert none.stdout.count("problem: mute: every run: no verdict: verifier: ") == 1, none.stdout
    assert none.stdout.count("problem:") == 1, "one cause is one problem"
    assert none.stderr.count("verifier failure") == 1, none.stderr
    assert none.stderr.count("the same failure") == 5


def test_trajectory_of_a_command_line_run_has_all_its_blobs(tmp_path: Path) -> None:
    """What is published must be whole: every digest is checked, not only named."""
    out = tmp_path / "out"
    assert coldframe("rollout", "run", make_task(tmp_path), "--harness", "oracle",
                     "--out", out).returncode == 0  # fmt: skip
    path = out / "attempts" / "one.0.0" / "trajectory.json"

    assert read_trajectory(path, RunDirectory(out).blobs, verify_blobs=True).rewards == {
        "reward": 1.0
    }


def test_rollout_show_of_hostile_output_does_not_drive_the_terminal(tmp_path: Path) -> None:
    """An agent's output is looked at by people whose terminals obey escape sequences."""
    out = tmp_path / "out"
    task = make_task(tmp_path, solution__solve_sh="#!/bin/sh\nprintf '\\033]0;owned\\007text\\n'\n")
    coldframe("rollout", "run", task, "--harness", "oracle", "--out", out)

    shown = coldframe("rollout", "show", out, "--attempt", "one.0.0")

    assert "owned" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "\x07" not in shown.stdout


def test_show_of_a_run_whose_tasks_were_all_refused_says_so_and_fails(tmp_path: Path) -> None:
    """An empty table and exit code 0 look like a run that went well."""
    task = write_task(tmp_path, "refused", toml=BASE + "gpus = 1\n")
    coldframe("rollout", "run", task, "--harness", "nop", "--out", tmp_path / "out")
    shown = coldframe("rollout", "show", tmp_path / "out")

    assert shown.returncode == 1
    assert shown.stdout.startswith("no attempt has a result")
    assert shown.stdout.count("gpus") == 1
    assert "PASSED" not in shown.stdout, "a table without a line"


def test_check_of_refused_tasks_alone_has_no_table(tmp_path: Path) -> None:
    """A header over nothing looks like output that was lost."""
    task = write_task(tmp_path, "refused", toml=BASE + "gpus = 1\n")
    checked = coldframe("task", "check", task)

    assert checked.returncode == 1
    assert checked.stdout.startswith("problem: refused: ")
    assert checked.stdout.endswith("\n0 of 1 tasks are honest\n")


def test_run_whose_image_fails_tells_its_cause_once_and_counts_nothing(tmp_path: Path) -> None:
    """A failure beside `0 attempts, 0 failed` contradicts itself. A slow build is not silent."""
    files = {"environment__Dockerfile": "FROM busybox\nRUN sleep 3; echo no >&2; exit 7\n"}
    toml = '[environment]\nnetwork_mode = "no-network"\n'
    task = write_task(tmp_path, "unbuilt", toml=toml, **files)

    done = coldframe("rollout", "run", task, "--harness", "oracle", "--out", tmp_path / "out")

    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "1 task, 1 sample"
    assert lines[1].startswith("unbuilt: building its image from ")
    assert lines[2].startswith("refused: ")
    assert "failure" not in done.stderr
    assert "0 attempts, 0 failed" in done.stdout
    assert "T_run" not in done.stdout
    assert "phases, in s" not in done.stdout


def test_task_init_of_an_empty_name_writes_nothing(tmp_path: Path) -> None:
    """An empty variable in a script must not fill the directory that one stands in."""
    words = command("task", "init", "")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "DIR is empty" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_run_directory_on_a_full_disk_is_named_with_the_remedy(tmp_path: Path) -> None:
    """`No space left on device` alone does not say which of the machine's disks."""
    task = make_task(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", out], check=True)
    try:
        done = coldframe("rollout", "run", task, "--harness", "oracle", "--out", out)
    finally:
        subprocess.run(["umount", out], check=True)

    assert done.returncode == 2, done.stderr
    assert f"{out}" in done.stderr
    assert "No space left on device; make room there, and run it again to go on" in done.stderr
