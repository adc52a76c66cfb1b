"""Tasks of several steps: one sandbox, one agent and one verdict after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.harnesses.base import ModelSettings
from coldframe.rollouts.attribution import may_retry
from coldframe.trajectories.store import BlobStore
from tests.doubles.model_endpoint import Bash, ModelEndpoint, Say
from tests.integration.rollouts.conftest import RunAttempt
from tests.integration.rollouts.test_attempt import make_task
from tests.unit.rollouts.tasks import BASE, write_files

pytestmark = pytest.mark.root
REWARD = "/logs/verifier/reward.txt"


def steps_task(root: Path, toml: str = "", **steps: dict[str, str]) -> Path:
    """Write a task of steps; each maps file names to contents, `toml` to its own fields."""
    said = "".join(
        f'[[steps]]\nname = "{name}"\n{files.pop("toml", "")}' for name, files in steps.items()
    )
    contents = {"task.toml": toml + BASE + said}
    for name, files in steps.items():
        graded = f"[ -e /{name} ] && echo 1 > {REWARD} || echo 0 > {REWARD}"
        default = {
            "instruction.md": f"Do {name}.\n",
            "tests/test.sh": f"#!/bin/sh\n{graded}\n",
            "solution/solve.sh": f"#!/bin/sh\ntouch /{name}\n",
        }
        contents |= {f"steps/{name}/{path}": text for path, text in (default | files).items()}
    return write_files(root / "steps-task", contents)


async def test_steps_are_run_in_order_in_one_sandbox_and_each_is_graded(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The control; the mean is over all three, and each step's share is told apart."""
    directory = steps_task(
        tmp_path,
        one={},
        two={"solution/solve.sh": "#!/bin/sh\ntest -e /one\n"},
        three={"solution/solve.sh": "#!/bin/sh\ntouch /three; sleep 0.2\n"},
    )
    trajectory = await run_attempt(directory)

    assert trajectory.failure is None
    assert trajectory.rewards == {"reward": pytest.approx(2 / 3)}
    first, second, third = trajectory.task_steps
    assert [one.rewards for one in trajectory.task_steps] == [
        {"reward": 1.0},
        {"reward": 0.0},
        {"reward": 1.0},
    ]
    assert [(one.first_step, one.end_step) for one in trajectory.task_steps] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]
    assert third.exec_s > 0.2 > second.exec_s
    assert first.verify_s > 0
    assert trajectory.verification is None
    assert [(one.name, one.step) for one in trajectory.phases] == [
        ("start", None),
        *((phase, name) for name in ("one", "two", "three") for phase in ("agent", "verify")),
    ]
    assert len({one.sandbox_id for one in trajectory.phases}) == 1


async def test_steps_final_takes_the_last_verdict(run_attempt: RunAttempt, tmp_path: Path) -> None:
    """As the format has it."""
    directory = steps_task(
        tmp_path,
        'multi_step_reward_strategy = "final"\n',
        one={},
        two={"solution/solve.sh": "#!/bin/sh\ntrue\n"},
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 0.0}


async def test_steps_after_one_below_min_reward_are_not_run(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Nothing can build on what is not there; the mean is over what was run."""
    directory = steps_task(
        tmp_path,
        one={"toml": "min_reward = 0.5\n"},
        two={"toml": "min_reward = { reward = 1.0 }\n", "solution/solve.sh": "#!/bin/sh\ntrue\n"},
        three={},
    )
    trajectory = await run_attempt(directory)

    assert [one.name for one in trajectory.task_steps] == ["one", "two"]
    assert [one.min_reward_missed for one in trajectory.task_steps] == [False, True]
    assert trajectory.rewards == {"reward": 0.5}


async def test_step_setup_runs_as_the_agent_before_it_and_is_gone(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A step's files arrive in the working directory; its script is no part of them."""
    directory = steps_task(
        tmp_path,
        one={
            "workdir/setup.sh": "#!/bin/sh\nid -un > who\n",
            "workdir/data/part": "x",
            "toml": 'agent = { user = "nobody" }\n',
            "solution/solve.sh": "#!/bin/sh\n"
            "ls -A | tr '\\n' ' ' > /var/tmp/seen; cat who data/part >> /var/tmp/seen\n",
            "tests/test.sh": "#!/bin/sh\ncat /var/tmp/seen\n"
            f'[ "$(cat /var/tmp/seen)" = "data who nobody\nx" ] && echo 1 > {REWARD}\n',
        },
        two={"workdir/setup.sh": "#!/bin/sh\necho broken >&2; exit 3\n"},
    )
    toml = directory / "task.toml"
    toml.write_text(
        toml.read_text().replace("[environment]\n", '[environment]\nworkdir = "/tmp"\n')
    )
    trajectory = await run_attempt(directory)

    one, two = trajectory.task_steps
    assert one.rewards == {"reward": 1.0}
    assert two.failure == trajectory.failure
    assert trajectory.rewards is None
    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == ("startup", "step_setup_failed")
    assert "exit code 3" in trajectory.failure.message
    assert "broken" in trajectory.failure.message


async def test_step_setup_may_remove_itself(run_attempt: RunAttempt, tmp_path: Path) -> None:
    """Scripts that no agent is to see often end so."""
    directory = steps_task(tmp_path, one={"workdir/setup.sh": '#!/bin/sh\nrm -- "$0"\n'})

    assert (await run_attempt(directory)).rewards == {"reward": 1.0}


async def test_steps_agent_finds_nothing_of_the_verifier_before_it(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The tests of one step would teach the next; what the verifier left running dies too."""
    directory = steps_task(
        tmp_path,
        one={
            "tests/test.sh": "#!/bin/sh\n(sleep 1000 > /dev/null 2>&1 &)\n"
            f"echo 1 > {REWARD}; echo canary-log > /logs/verifier/log\n",
            "tests/canary-data": "canary-data",
        },
        two={
            "solution/solve.sh": "#!/bin/sh\n"
            "find / -xdev -name '*canary*' > /found; ls -d /tests /logs/verifier >> /found 2>&1\n"
            "pgrep -x sleep >> /found\n",
            "tests/test.sh": "#!/bin/sh\ncat /found\n"
            f"[ $(grep -vc 'No such file' /found) = 0 ] && echo 1 > {REWARD}\n",
        },
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}, trajectory.task_steps
    assert [one.name for one in trajectory.phases[2].killed] == ["sleep"]


async def test_steps_harness_is_dead_before_its_verifier_and_its_services_live_on(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A server started in one step may be what the next one uses; a command in flight is not."""
    directory = steps_task(
        tmp_path,
        one={
            "toml": "agent = { timeout_sec = 0.7 }\n",
            "solution/solve.sh": "#!/bin/sh\nsetsid sleep 1000 > /dev/null 2>&1 & sleep 999\n",
            "tests/test.sh": f"#!/bin/sh\npgrep -f 'sleep 999' || echo 1 > {REWARD}\n",
        },
        two={
            "solution/solve.sh": "#!/bin/sh\nsleep 1001 > /dev/null 2>&1 & touch /two\n",
            "tests/test.sh": f"#!/bin/sh\npgrep -f 'sleep 1001' && echo 1 > {REWARD}\n",
        },
        three={"tests/test.sh": f"#!/bin/sh\npgrep -f 'sleep 1001' && echo 1 > {REWARD}\n"},
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    assert trajectory.task_steps[0].termination == "agent_deadline"


async def test_steps_of_a_model_are_aligned_with_its_turns(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Tokens and times of each step are its own turns', not its neighbours'."""
    directory = steps_task(tmp_path, one={}, two={})
    script = {
        "Do one": [Bash("touch /one"), Say("done")],
        "Do two": [Bash("true"), Bash("touch /two"), Say("done")],
    }
    with ModelEndpoint(script) as endpoint:
        model = ModelSettings("policy", endpoint.base_url)
        trajectory = await run_attempt(directory, "react", model=model)

    assert trajectory.rewards == {"reward": 1.0}
    ranges = [(one.first_step, one.end_step) for one in trajectory.task_steps]
    assert ranges == [(0, 2), (2, 5)]
    tokens = [one.totals.completion_tokens for one in trajectory.task_steps]
    assert None not in tokens
    assert sum(filter(None, tokens)) == trajectory.totals.completion_tokens
    assert [one.totals.calls for one in trajectory.task_steps] == [1, 2]
    blobs = BlobStore(tmp_path / "blobs")
    prompts = [b"".join(map(blobs.get, one.prompt)) for one in trajectory.task_steps]
    assert ["Do one" in prompts[0].decode(), "Do two" in prompts[1].decode()] == [True, True]
    assert b"Do one" not in prompts[1]


async def test_step_that_is_not_healthy_is_a_startup_failure_that_is_not_tried_again(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """An agent that breaks what the next step needs must not get a second chance by it."""
    check = 'healthcheck = { command = "test -e /well", retries = 2, interval_sec = 0.05 }\n'
    directory = steps_task(
        tmp_path,
        one={"solution/solve.sh": "#!/bin/sh\ntouch /one\n"},
        two={"toml": check},
    )
    first = steps_task(tmp_path / "first", one={"toml": check})
    trajectory, never = await run_attempt(directory), await run_attempt(first)

    for one, phase in ((trajectory, "step_setup"), (never, "setup")):
        assert one.failure
        assert (one.failure.side, one.failure.code) == ("startup", "unhealthy")
        assert one.failure.phase == phase
        assert one.rewards is None
    assert trajectory.failure and never.failure
    assert (may_retry(trajectory.failure), may_retry(never.failure)) == (False, True)
    assert [one.rewards for one in trajectory.task_steps] == [{"reward": 1.0}, None]
    assert trajectory.phases[-1].name == "start"
    assert trajectory.phases[-1].step == "two"


async def test_environment_that_is_not_healthy_is_a_startup_failure(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """No agent is asked to work where its service never came up."""
    toml = "healthcheck = { command = 'exit 4', retries = 1 }\n"
    trajectory = await run_attempt(make_task(tmp_path, toml=toml))

    assert trajectory.failure
    assert (trajectory.failure.code, trajectory.failure.phase) == ("unhealthy", "setup")
    assert "exit code 4" in trajectory.failure.message
    assert trajectory.steps == ()
    assert [one.name for one in trajectory.phases] == ["start"]


async def test_step_healthcheck_runs_as_the_agent_and_gates_its_step(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """It asks on the agent's terms; a step that is not healthy is not begun."""
    check = "[steps.healthcheck]\ncommand = 'test $(id -un) = www-data'\nretries = 1\n"
    user = "[steps.agent]\nuser = 'www-data'\n"
    solution = "#!/bin/sh\ntouch /tmp/one\n"
    test = f"#!/bin/sh\n[ -e /tmp/one ] && echo 1 > {REWARD}\n"
    files = {"solution/solve.sh": solution, "tests/test.sh": test}

    healthy = await run_attempt(steps_task(tmp_path / "a", one={"toml": user + check, **files}))
    unhealthy = await run_attempt(steps_task(tmp_path / "b", one={"toml": check, **files}))

    assert healthy.rewards == {"reward": 1.0}
    assert unhealthy.failure is not None
    assert (unhealthy.failure.code, unhealthy.failure.side) == ("unhealthy", "startup")
    assert unhealthy.steps == ()


SETS_UP = {"workdir/setup.sh": "#!/bin/sh\nid -u > /tmp/who\n"}


async def test_step_whose_user_an_agent_has_removed_is_set_up_all_the_same(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Else a first step that failed has no reward: the whole has none."""
    directory = steps_task(
        tmp_path,
        one={"solution/solve.sh": "#!/bin/sh\nrm /etc/passwd\n"},
        two=SETS_UP
        | {
            "toml": '[steps.agent]\nuser = "games"\n',
            "tests/test.sh": f"#!/bin/sh\n[ $(cat /tmp/who) = 5 ] && echo 1 > {REWARD}\n",
        },
    )
    control, trajectory = await run_attempt(directory, "nop"), await run_attempt(directory)

    assert control.rewards == {"reward": 0.5}, control.failure
    assert trajectory.rewards == {"reward": 0.5}, trajectory.failure
    assert [one.what for one in trajectory.tamper] == ["user_changed"] * 2


@pytest.mark.parametrize(
    ("broken", "side", "code"),
    [("rm /bin/sh", "policy", "grading_prevented"), ("true", "startup", "step_setup_failed")],
)
async def test_step_that_cannot_be_set_up_is_the_agents_failure_only_if_it_broke_the_system(
    run_attempt: RunAttempt, tmp_path: Path, broken: str, side: str, code: str
) -> None:
    """Its reward would be missing either way; only one of them is the task's to mend."""
    fails = {"workdir/setup.sh": "#!/bin/sh\n[ ! -e /made ]\n"}
    directory = steps_task(
        tmp_path,
        one={
            "solution/solve.sh": f"#!/bin/bash\ntouch /made; {broken}\n",
            "tests/test.sh": f"#!/bin/bash\necho 0 > {REWARD}\n",
        },
        two=fails if broken == "true" else SETS_UP,
    )
    trajectory = await run_attempt(directory)

    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == (side, code)
    assert not may_retry(trajectory.failure)
