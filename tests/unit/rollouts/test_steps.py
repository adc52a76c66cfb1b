"""A step that inherits the wrong terms is graded by another task's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.protocol.errors import TaskError
from coldframe.rollouts.artifacts import Artifact
from coldframe.rollouts.load import load_task
from coldframe.rollouts.task import CollectHook, Healthcheck, Task
from tests.unit.rollouts.tasks import BASE, write_files

STEPS = """
schema_version = "1.4"
multi_step_reward_strategy = "final"
artifacts = ["/srv/all"]
[agent]
timeout_sec = 100
user = "agent"
[verifier]
timeout_sec = 20
env = { A = "task", B = "task" }
[[verifier.collect]]
command = "first"
[environment]
docker_image = "debian:bookworm"
network_mode = "no-network"
[[steps]]
name = "plan"
min_reward = 0.5
[[steps]]
name = "build it"
min_reward = { tests = 1, style = 0.25 }
artifacts = [{ source = "/srv/one", exclude = ["*.o"] }]
[steps.agent]
timeout_sec = 7
user = 0
network_mode = "allowlist"
allowed_hosts = ["files.example"]
[steps.verifier]
timeout_sec = 3
user = "judge"
env = { B = "step" }
network_mode = "public"
[[steps.verifier.collect]]
command = "second"
[steps.healthcheck]
command = "true"
retries = 1
"""
FILES = {
    "tests/test.sh": "shared",
    "tests/helper.sh": "shared",
    "steps/plan/instruction.md": "# canary line\n\nPlan.\n",
    "steps/plan/solution/solve.sh": "plan",
    "steps/build it/instruction.md": "Build.\n",
    "steps/build it/tests/test.sh": "own",
    "steps/build it/workdir/setup.sh": "setup",
    "solution/solve.sh": "shared",
    "wrong/lazy/build it/solve.sh": "wrong",
    "wrong/rash/plan/solve.sh": "wrong",
}


def load(root: Path, toml: str = STEPS, files: dict[str, str] | None = None) -> Task:
    return load_task(write_files(root / "one", {"task.toml": toml, **(files or FILES)}))


def test_steps_inherit_what_the_task_says_and_replace_it_field_by_field(tmp_path: Path) -> None:
    """The control of all overrides: the first step has none, the second every one."""
    task = load(tmp_path)
    plan, build = task.steps

    assert (task.multi_step, task.reward_strategy) == (True, "final")
    assert (plan.name, plan.instruction) == ("plan", "Plan.\n")
    assert (plan.agent.timeout_s, plan.agent.user, plan.agent.network.empty) == (100, "agent", True)
    assert (plan.verifier.timeout_s, plan.verifier.user) == (20.0, None)
    assert plan.verifier.env == {"A": "task", "B": "task"}
    assert plan.verifier.collect == (CollectHook("first"),)
    assert plan.artifacts == (Artifact("/logs/artifacts"), Artifact("/srv/all"))
    assert (plan.min_reward, plan.healthcheck, plan.setup) == ({"reward": 0.5}, None, None)

    assert (build.agent.timeout_s, build.agent.user) == (7.0, 0)
    assert [str(rule) for rule in build.agent.network.rules] == ["files.example"]
    assert (build.verifier.timeout_s, build.verifier.user) == (3.0, "judge")
    assert (build.verifier.env, build.verifier.network.public) == ({"A": "task", "B": "step"}, True)
    assert build.verifier.collect == (CollectHook("first"), CollectHook("second"))
    assert build.artifacts[1:] == (Artifact("/srv/all"), Artifact("/srv/one", None, ("*.o",)))
    assert build.min_reward == {"tests": 1.0, "style": 0.25}
    assert build.healthcheck == Healthcheck("true", retries=1)


def test_steps_find_their_own_files_before_those_of_the_task(tmp_path: Path) -> None:
    """A step graded by another step's tests, or solved by its solution, is another task."""
    task = load(tmp_path)
    root, (plan, build) = task.directory, task.steps

    assert plan.verifier.tests == (root / "tests",)
    assert plan.verifier.script == root / "tests" / "test.sh"
    assert build.verifier.tests == (root / "tests", root / "steps/build it/tests")
    assert build.verifier.script == root / "steps/build it/tests/test.sh"
    assert plan.reference == root / "steps/plan/solution"
    assert build.reference == root / "solution"
    assert build.workdir == root / "steps/build it/workdir"
    assert build.setup == root / "steps/build it/workdir/setup.sh"


def test_steps_that_a_wrong_solution_leaves_out_are_solved_rightly(tmp_path: Path) -> None:
    """So that a late step can be wrong at all: the ones before it must pass."""
    task = load(tmp_path)
    plan, build = task.steps

    assert task.wrong == ("lazy", "rash")
    assert task.solution(plan, "lazy") == plan.reference
    assert task.solution(build, "lazy") == task.directory / "wrong/lazy/build it"
    assert task.solution(plan, "rash") == task.directory / "wrong/rash/plan"
    with pytest.raises(TaskError, match="wrong/absent"):
        task.solution(plan, "absent")


def test_digests_of_a_task_follow_the_files_of_its_steps(tmp_path: Path) -> None:
    """A changed step is a changed task, and changed tests are a changed verifier."""
    before = load(tmp_path / "a")
    worded = load(tmp_path / "b", files=FILES | {"steps/plan/instruction.md": "Other.\n"})
    graded = load(tmp_path / "c", files=FILES | {"steps/build it/tests/test.sh": "other"})

    assert len({before.digest, worded.digest, graded.digest}) == 3
    assert before.tests_digest == worded.tests_digest != graded.tests_digest


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ('name = "../up"', "[steps.../up] name"),
        ('name = ""', "name"),
        ('name = "BUILD IT"', "stands there twice"),
        (
            'name = "plan"\nmin_rewards = 1',
            "min_rewards is not a field that is known here; the nearest is min_reward",
        ),
        ('name = "plan"\nmin_reward = "all"', "[steps.plan] min_reward"),
        ('name = "plan"\nmin_reward = nan', "[steps.plan] min_reward"),
        ('name = "plan"\nmin_reward = { a = true }', "[steps.plan] min_reward"),
        ('name = "plan"\n[steps.agent]\nuser = 1.5', "[steps.plan.agent] user"),
        ('name = "plan"\n[steps.verifier]\nmood = 1', "[steps.plan.verifier] mood"),
        ('name = "plan"\n[steps.healthcheck]\nretries = 2', "[steps.plan.healthcheck] command"),
        ('name = "elsewhere"', "steps/elsewhere/instruction.md"),
    ],
)
def test_step_with_a_wrong_field_is_refused_by_its_name(
    tmp_path: Path, change: str, name: str
) -> None:
    """A task of twelve steps is not searched by hand."""
    with pytest.raises(TaskError) as caught:
        load(tmp_path, STEPS.replace('name = "plan"\nmin_reward = 0.5', change, 1))

    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("steps/forgotten/instruction.md", "steps/forgotten"),
        ("steps/plan/trajectory.json", "trajectory.json"),
        ("steps/build it/tests/compose.yaml", "compose.yaml"),
        ("wrong/lazy/never/solve.sh", "wrong/lazy/never"),
        ("wrong/none/solve.sh", "wrong/none"),
        ("wrong/lazy/plan/other.sh", "wrong/lazy/plan/solve.sh"),
    ],
)
def test_steps_with_a_file_that_no_step_uses_are_refused_by_its_name(
    tmp_path: Path, path: str, name: str
) -> None:
    """What nobody reads was meant to do something."""
    with pytest.raises(TaskError, match=name):
        load(tmp_path, files=FILES | {path: "x"})


@pytest.mark.parametrize("missing", ["steps/plan/instruction.md", "tests/test.sh"])
def test_steps_without_a_needed_file_are_refused_by_its_name(tmp_path: Path, missing: str) -> None:
    """Found before the first step has cost anything."""
    name = missing.replace("tests/test.sh", "steps/plan/tests/test.sh")
    with pytest.raises(TaskError, match=name):
        load(tmp_path, files={path: text for path, text in FILES.items() if path != missing})


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
OWN_IMAGE = '[verifier.environment]\ndocker_image = "judge"\nmemory_mb = 64\n'


@pytest.mark.parametrize(
    ("toml", "files", "image", "own"),
    [
        (BASE + SEPARATE, {}, "debian:bookworm", False),
        (BASE + OWN_IMAGE, {}, "judge", True),
        (BASE + SEPARATE, {"tests/Dockerfile": "FROM a"}, None, True),
        (BASE + SEPARATE + OWN_IMAGE, {"tests/Dockerfile": "FROM a"}, "judge", True),
        (BASE + "[verifier.environment]\nmemory_mb = 64\n", {}, "debian:bookworm", False),
    ],
)
def test_separate_verifier_is_made_from_the_nearest_image(
    tmp_path: Path, toml: str, files: dict[str, str], image: str | None, own: bool
) -> None:
    """An image of the verifier's own holds its tests; into a copy of the agent's they are put."""
    base = {"instruction.md": "Do.", "tests/test.sh": "x"}
    task = load_task(write_files(tmp_path / "one", {"task.toml": toml, **base, **files}))
    verifier = task.steps[0].verifier

    assert verifier.environment is not None
    assert verifier.environment.docker_image == image
    assert verifier.tests == (() if own else (task.directory / "tests",))
    assert (verifier.script is None) is own
    if image is None:
        assert verifier.environment.dockerfile == task.directory / "tests" / "Dockerfile"
        assert verifier.environment.context == task.directory / "tests"
    if "memory_mb" in toml:
        assert verifier.environment.memory_mb == 64


def test_separate_verifier_has_the_network_of_its_own_environment(tmp_path: Path) -> None:
    """The agent's baseline is not the verifier's once they are apart; `[verifier]` still wins."""
    base = {"instruction.md": "Do.", "tests/test.sh": "x"}
    own = BASE + '{}[verifier.environment]\nnetwork_mode = "public"\n'

    def mode(verifier: str) -> str:
        files = {"task.toml": own.format(verifier), **base}
        step = load_task(write_files(tmp_path / "one", files)).steps[0]
        assert step.agent.network_mode == "no-network"
        return step.verifier.network_mode

    assert mode("") == "public"
    assert mode('[verifier]\nnetwork_mode = "allowlist"\n') == "allowlist"


def test_step_may_be_graded_apart_while_the_others_are_not(tmp_path: Path) -> None:
    """A step's environment means separate, and its image's tests are its own."""
    toml = STEPS.replace('env = { B = "step" }', 'environment = { docker_image = "judge" }')
    plan, build = load(tmp_path, toml).steps

    assert (plan.verifier.separate, build.verifier.separate) == (False, True)
    assert build.verifier.environment is not None
    assert build.verifier.environment.docker_image == "judge"
    assert build.verifier.tests == ()


@pytest.mark.parametrize(
    ("verifier", "files", "command"),
    [
        (SEPARATE, {}, "agents"),
        (SEPARATE, {"tests/Dockerfile": "FROM a"}, None),
        (OWN_IMAGE, {}, None),
        (OWN_IMAGE + 'healthcheck = { command = "own" }\n', {}, "own"),
    ],
)
def test_separate_verifier_is_asked_for_its_own_health(
    tmp_path: Path, verifier: str, files: dict[str, str], command: str | None
) -> None:
    """A service that only the agent's image has would keep the verifier from ever starting."""
    toml = BASE + 'healthcheck = { command = "agents" }\n' + verifier
    base = {"instruction.md": "Do.", "tests/test.sh": "x"}
    task = load_task(write_files(tmp_path / "one", {"task.toml": toml, **base, **files}))
    environment = task.steps[0].verifier.environment

    assert environment is not None
    check = environment.healthcheck
    assert (None if check is None else check.command) == command
