"""Harbor jobs as a source of rollouts: what is refused before, and what is rejected after.

The job is a fake here; tests/harbor runs true ones.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldframe.cli.main import main
from coldframe.integrations.harbor_rl import (
    Caps,
    ContractError,
    HarborRLAdapter,
    PolicyIdentity,
    PolicyRollout,
    RLTask,
    run_harbor_job,
    tasks_of_split,
)
from coldframe.integrations.harbor_rl.adapter import BIG_JOB
from coldframe.integrations.harbor_rl.provenance import provenance
from coldframe.integrations.harbor_rl.runner import Watch
from coldframe.learning.contracts import MULTI_STEP_MEAN
from coldframe.protocol.errors import CapabilityError

POLICY = PolicyIdentity("ab" * 32, "tok@1", "chat@1", {"temperature": 1.0}, 0)
DETAIL = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5]],
    "completion_token_ids": [[3, 4], [6]],
    "logprobs": [[-0.5, -0.25], [-1.5]],
}
AGENT_RESULT = {"n_input_tokens": 7, "n_output_tokens": 3, "rollout_details": [DETAIL]}


@pytest.fixture(autouse=True)
def _without_harbor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever these tests run, Harbor is not there: its own lane is tests/harbor."""
    for name in ("harbor", "harbor.job", "harbor.models.job.config"):
        monkeypatch.setitem(sys.modules, name, None)


def result(trial_name: str = "sum__abc", path: str = "tasks/sum", **changes: Any) -> dict[str, Any]:
    """Return the result.json of a trial as Harbor 0.18 writes it."""
    base = {
        "id": "594025f3-7d65-4655-8576-4bee95002eae",
        "task_name": "demo/sum",
        "trial_name": trial_name,
        "trial_uri": "file:///nowhere/jobs/train/run/" + trial_name,
        "task_id": {"path": path},
        "source": None,
        "task_checksum": "1" * 64,
        "config": {"task": {"path": path}, "trials_dir": "jobs/train/run", "agent": {}},
        "agent_info": {"name": "terminus-2", "version": "2.0.0", "model_info": None},
        "agent_result": copy.deepcopy(AGENT_RESULT),
        "verifier_result": {"rewards": {"reward": 1.0}},
        "exception_info": None,
        "started_at": "2026-01-01T10:00:00Z",
        "finished_at": "2026-01-01T10:01:00Z",
        "step_results": None,
    }
    return base | changes


def adapter(directory: Path, **options: Any) -> HarborRLAdapter:
    """Return an adapter whose policy is known."""
    return HarborRLAdapter(directory / "jobs", "demo/model", **{"policy": POLICY} | options)


def spec(key: str = "sum", split: str = "train") -> RLTask:
    """Return a task of a local directory."""
    return RLTask(key, split, {"path": f"tasks/{key}"})


class FakeJobs:
    """Stands where Harbor is called, and returns what it is told to."""

    def __init__(self, *trials: dict[str, Any], **more: Any) -> None:
        self.configs: list[Any] = []
        self.trials, self.more = list(trials), more

    async def __call__(self, config: Any) -> Any:
        self.configs.append(config)
        return SimpleNamespace(
            **{"n_total_trials": len(self.trials), "trial_results": self.trials} | self.more
        )


# --- before a job ---------------------------------------------------------------------


def test_configuration_asks_for_one_linear_conversation_with_tokens(tmp_path: Path) -> None:
    """A summary, or a trial without ids, would be thrown away afterwards."""
    made = adapter(
        tmp_path,
        environment_type="coldframe.integrations.harbor:ColdframeEnvironment",
        environment_kwargs={"url": "http://127.0.0.1:1"},
        api_base="http://127.0.0.1:2/v1",
        model_info={"max_input_tokens": 8000},
        agent_kwargs={"max_turns": 5},
        agent_timeout_multiplier=2.0,
    ).build_config([spec()], phase="train", run_id="run-1", attempts=4, concurrency=8)

    assert made == {
        "job_name": "run-1",
        "jobs_dir": str(tmp_path / "jobs" / "train"),
        "n_attempts": 4,
        "n_concurrent_trials": 8,
        "quiet": True,
        "retry": {"max_retries": 0},
        "environment": {
            "import_path": "coldframe.integrations.harbor:ColdframeEnvironment",
            "kwargs": {"url": "http://127.0.0.1:1"},
        },
        "agents": [
            {
                "name": "terminus-2",
                "model_name": "demo/model",
                "kwargs": {
                    "collect_rollout_details": True,
                    "enable_summarize": False,
                    "record_terminal_session": False,
                    "api_base": "http://127.0.0.1:2/v1",
                    "model_info": {"max_input_tokens": 8000},
                    "max_turns": 5,
                },
            }
        ],
        "tasks": [{"path": "tasks/sum"}],
        "agent_timeout_multiplier": 2.0,
    }


def test_configuration_of_an_evaluation_lies_apart_and_collects_no_tokens(tmp_path: Path) -> None:
    """What is not collected cannot be trained on."""
    made = adapter(tmp_path, environment_type="docker").build_config(
        [spec(split="eval")], phase="eval", run_id="run-1", attempts=1, concurrency=1
    )

    assert made["jobs_dir"] == str(tmp_path / "jobs" / "eval")
    assert made["environment"]["type"] == "docker"
    assert "collect_rollout_details" not in made["agents"][0]["kwargs"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"specs": []}, "empty batch"),
        ({"specs": [spec(), spec()]}, "duplicate: the same key"),
        ({"specs": [spec(), RLTask("other", "train", "tasks/sum")]}, "duplicate: the same task"),
        ({"specs": [spec("")]}, "has no key"),
        ({"specs": [spec(split="eval")]}, "wrong split"),
        ({"specs": [spec(split="")]}, "wrong split"),
        ({"phase": "eval"}, "wrong split"),
        ({"phase": "test"}, "neither 'train' nor 'eval'"),
        ({"specs": [RLTask("sum", "train", 5)]}, "no task configuration"),
        ({"attempts": 0}, "attempts: is below 1"),
        ({"attempts": True}, "attempts: is below 1"),
        ({"attempts": 1.0}, "attempts: is below 1"),
        ({"concurrency": -1}, "concurrency: is below 1"),
        *(
            ({"run_id": run_id}, "one path component")
            for run_id in ("", "..", ".", "a/b", "/a", "a\0", "a b", ".hidden", "x" * 129, None)
        ),
    ],
)
async def test_request_that_may_not_become_a_job_is_refused_before_there_is_one(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Nothing has been run or written by then."""
    jobs = FakeJobs(result())
    asked = {"specs": [spec()], "phase": "train", "run_id": "r", "attempts": 1, "concurrency": 1}

    with pytest.raises(ContractError, match=words):
        adapter(tmp_path, run_job=jobs).build_config(**asked | changes)
    if "phase" not in changes:
        del asked["phase"]
        with pytest.raises(ContractError, match=words):
            await adapter(tmp_path, run_job=jobs).generate(**asked | changes)
    assert jobs.configs == []
    assert not (tmp_path / "jobs").exists()


async def test_run_id_is_never_used_again(tmp_path: Path) -> None:
    """Harbor would resume the old job and give its trials a second time."""
    made = adapter(tmp_path, run_job=FakeJobs(result()))
    await made.generate([spec()], run_id="r", attempts=1, concurrency=1)

    with pytest.raises(ContractError, match="never used again"):
        await made.generate([spec()], run_id="r", attempts=1, concurrency=1)
    with pytest.raises(ContractError, match="never used again"):
        made.build_config([spec()], phase="train", run_id="r", attempts=1, concurrency=1)


def test_tasks_of_a_frozen_split_are_asked_for_as_they_were(tmp_path: Path) -> None:
    """An evaluation task cannot come into the training queue by a slip, nor a changed one."""
    for number in range(8):
        root = tmp_path / "tasks" / f"t{number}"
        (root / "tests").mkdir(parents=True)
        (root / "task.toml").write_text(f'[metadata]\ntemplate = "g{number}"\n')
        (root / "instruction.md").write_text(" ".join(f"w{number}-{at}" for at in range(30)))
    make = ["splits", "make", str(tmp_path / "tasks"), "--by", "template"]
    make += ["--split", "train=0.5", "--split", "eval=0.5", "--out", str(tmp_path / "splits")]
    assert main(make) == 0

    train, held_out = (
        tasks_of_split(tmp_path / "splits" / f"{name}.json", tmp_path / "tasks")
        for name in ("train", "eval")
    )
    assert {one.split for one in train} == {"train"}
    assert len(train) + len(held_out) == 8
    made = adapter(tmp_path)
    config = made.build_config(train, phase="train", run_id="r", attempts=1, concurrency=1)
    assert len(config["tasks"]) == len(train)
    with pytest.raises(ContractError, match="wrong split"):
        made.build_config(held_out, phase="train", run_id="r", attempts=1, concurrency=1)

    (tmp_path / "tasks" / train[0].key / "instruction.md").write_text("another task")
    with pytest.raises(ContractError, match="is not the task that was put into split 'train'"):
        tasks_of_split(tmp_path / "splits" / "train.json", tmp_path / "tasks")


# --- a trial --------------------------------------------------------------------------


def _object(value: Any) -> Any:
    """Return maps as objects, as Harbor's own models are."""
    if isinstance(value, dict) and not value.keys() & {"reward", "style", "prompt_token_ids"}:
        return SimpleNamespace(**{name: _object(one) for name, one in value.items()})
    return value


@pytest.mark.parametrize("form", [lambda trial: trial, _object])
def test_trial_becomes_a_rollout(tmp_path: Path, form: Callable[[Any], Any]) -> None:
    """From Harbor's objects and from its files alike, to the last bit."""
    made = adapter(tmp_path).to_policy_rollout(form(result()))

    assert isinstance(made, PolicyRollout)
    assert (made.trial_name, made.task_name) == ("sum__abc", "demo/sum")
    assert [list(row) for row in made.prompt_token_ids] == DETAIL["prompt_token_ids"]
    assert [list(row) for row in made.completion_token_ids] == DETAIL["completion_token_ids"]
    assert [list(row) for row in made.old_logprobs] == DETAIL["logprobs"]
    assert (made.reward, made.reward_key, made.split) == (1.0, "reward", "train")


def _detail(**changes: Any) -> dict[str, Any]:
    detail = {name: rows for name, rows in (DETAIL | changes).items() if rows is not None}
    return {"agent_result": AGENT_RESULT | {"rollout_details": [detail]}}


STEP = {"step_name": "one", "agent_result": AGENT_RESULT, "exception_info": None}
FAILED = {"exception_type": "AgentTimeoutError", "exception_message": "600 s"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exception_info": FAILED}, "AgentTimeoutError: 600 s"),
        ({"verifier_result": None}, "has no 'reward'"),
        ({"verifier_result": {"rewards": None}}, "has no 'reward'"),
        ({"verifier_result": {"rewards": {"style": 1.0}}}, "has no 'reward'"),
        ({"verifier_result": {"rewards": {"reward": True}}}, "bool"),
        ({"verifier_result": {"rewards": {"reward": float("nan")}}}, "not finite"),
        ({"agent_result": None}, "has no rollout details"),
        ({"agent_result": AGENT_RESULT | {"rollout_details": None}}, "has no rollout details"),
        ({"agent_result": AGENT_RESULT | {"rollout_details": []}}, "has no rollout details"),
        (_detail(prompt_token_ids=None), "has no rollout details"),
        (_detail(completion_token_ids=None), "has no rollout details"),
        (_detail(logprobs=None), "has no log-probabilities"),
        (_detail(completion_token_ids=[[3, 4]]), "lengths differ"),
        (_detail(logprobs=[[-0.5], [-1.5]]), "lengths differ"),
        (_detail(logprobs=[[-0.5, float("nan")], [-1.5]]), "not finite"),
        (_detail(logprobs=[[-0.5, True], [-1.5]]), "bool"),
        (_detail(logprobs=[[-0.5, 0.1], [-1.5]]), "over 0"),
        (_detail(completion_token_ids=[[3, 4], [True]]), "bool"),
        (_detail(completion_token_ids=[[3, 4], [6.0]]), "float"),
        (_detail(prompt_token_ids=[[1, 2, 3, 4, 5], [1, 2]]), "does not extend"),
        (_detail(prompt_token_ids=[[1, 2], [7, 7, 7, 7, 7]]), "does not extend"),
        ({"agent_result": AGENT_RESULT | {"n_input_tokens": None}}, "nothing proves"),
        ({"agent_result": AGENT_RESULT | {"n_output_tokens": 4}}, "lengths differ"),
        ({"agent_result": AGENT_RESULT | {"rollout_details": [DETAIL, DETAIL]}}, "second|segment"),
        (
            {"step_results": [STEP | {"verifier_result": {"rewards": {"reward": 1.0}}}]},
            "step-aware",
        ),
        ({"step_results": [STEP | {"exception_info": FAILED}]}, "step 'one' ended in"),
        ({"config": {"trials_dir": "JOBS/eval/run"}}, "wrong split"),
    ],
)
def test_trial_that_may_not_be_trained_on_is_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Trial, field and value."""
    text = json.dumps(result(**changes)).replace("JOBS", str(tmp_path / "jobs"))

    with pytest.raises(ContractError, match=words) as caught:
        adapter(tmp_path).to_policy_rollout(json.loads(text))
    assert caught.value.trial == "sum__abc"


def test_trial_without_a_policy_is_rejected(tmp_path: Path) -> None:
    """Log-probabilities of nobody knows whom are good for nothing."""
    with pytest.raises(ContractError, match="has no policy identity"):
        adapter(tmp_path, policy=None).to_policy_rollout(result())


def test_trial_of_steps_becomes_a_rollout_by_a_step_aware_topology(tmp_path: Path) -> None:
    """Harbor keeps each step's tokens, reward and exception with the step."""
    later = {
        name: [[value + 100 for value in row] for row in DETAIL[name]]
        for name in DETAIL
        if name != "logprobs"
    }
    other = AGENT_RESULT | {"rollout_details": [DETAIL | later]}
    steps = [
        STEP | {"verifier_result": {"rewards": {"reward": 1.0}}},
        STEP
        | {
            "step_name": "two",
            "agent_result": other,
            "verifier_result": {"rewards": {"reward": 0.5}},
        },
    ]
    trial = result(
        agent_result=None, step_results=steps, verifier_result={"rewards": {"reward": 0.75}}
    )

    made = adapter(tmp_path, topology=MULTI_STEP_MEAN).to_policy_rollout(trial)

    assert made.reward == 0.75
    assert [(one.name, one.reward) for one in made.spans] == [("one", 1.0), ("two", 0.5)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"reward.json": '{"reward": 1}', "reward.txt": "0"}, "two reward files"),
        ({"reward.json": '{"reward": true}'}, "is no reward"),
        ({"reward.json": '{"reward": "1.0"}'}, "is no reward"),
        ({"reward.txt": "0"}, "is not what the result says"),
        ({"reward.json": '{"reward": 1, "style": 1}'}, "is not what the result says"),
    ],
)
def test_reward_file_that_says_something_else_is_rejected(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    """Harbor makes numbers of text and bools, and takes a planted file before the verifier's."""
    verifier = tmp_path / "a trial" / "verifier"
    verifier.mkdir(parents=True)
    for name, text in files.items():
        (verifier / name).write_text(text)
    trial = result(trial_uri=(tmp_path / "a trial").as_uri())

    with pytest.raises(ContractError, match=words):
        adapter(tmp_path).to_policy_rollout(trial)

    for name in files:
        (verifier / name).unlink()
    (verifier / "reward.txt").write_text("1.0\n")
    assert adapter(tmp_path).to_policy_rollout(trial).reward == 1.0


@pytest.mark.parametrize(
    ("started_at", "known"),
    [
        ("2026-01-01T10:00:00Z", 1767261600.0),
        ("2026-01-01T11:00:00+01:00", 1767261600.0),
        ("2026-01-01T10:00:00", None),  # of any zone
        ("yesterday", None),
    ],
)
def test_time_of_a_trial_is_known_or_its_provenance_is_not(
    started_at: str, known: float | None
) -> None:
    """A time without its zone was taken for one of this machine's own."""
    found = provenance(result(started_at=started_at), reward_schema="demo@1", version="0.18.0")

    assert (found and found.started_at) == known


@pytest.mark.parametrize("linked", ["verifier/reward.json", "verifier"])
def test_reward_file_that_is_a_link_is_rejected_and_not_read(tmp_path: Path, linked: str) -> None:
    """Where Harbor mounts the verifier's directory, a sandbox makes links to this machine's files,
    and the refusal quoted what stood there."""
    secret = tmp_path / "host"
    secret.mkdir()
    (secret / "reward.json").write_text("root:secret")
    place = tmp_path / "trial" / linked
    place.parent.mkdir(parents=True)
    place.symlink_to(secret / "reward.json" if linked.endswith(".json") else secret)

    with pytest.raises(ContractError, match="links are not followed") as refused:
        adapter(tmp_path).to_policy_rollout(result(trial_uri=(tmp_path / "trial").as_uri()))

    assert refused.value.rule == "reward_file"
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("uri", ["file://[no/address", "file://[x]/trial", "[", ""])
def test_place_that_is_no_url_is_not_looked_at(tmp_path: Path, uri: str) -> None:
    """Which of them Python refuses changes from release to release."""
    assert adapter(tmp_path).to_policy_rollout(result(trial_uri=uri)).reward == 1.0


# --- a job ----------------------------------------------------------------------------


async def test_groups_keep_the_rejected_beside_the_rollouts(tmp_path: Path) -> None:
    """So that a baseline is taken over what is left, and not over zeros."""
    trials = [
        result("other__a", "tasks/other"),
        result("sum__a"),
        result("sum__b", exception_info=FAILED),
        result("other__b", "tasks/other", verifier_result=None),
    ]
    jobs = FakeJobs(*trials, stats=SimpleNamespace(n_retries=3))

    made = await adapter(tmp_path, run_job=jobs).generate(
        [spec(), spec("other")], run_id="r", attempts=2, concurrency=2
    )

    assert [one.key for one in made.groups] == ["sum", "other"]
    assert [[one.trial_name for one in group.rollouts] for group in made.groups] == [
        ["sum__a"],
        ["other__a"],
    ]
    rejected = [(one.trial_name, one.error.rule) for group in made.groups for one in group.rejected]
    assert rejected == [("sum__b", "trial_has_no_exception"), ("other__b", "reward_is_there")]
    assert (made.retries, made.stopped, len(made.rollouts)) == (3, None, 2)


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (FakeJobs(result("a")), "other trials than the 2"),
        (FakeJobs(result("a"), n_total_trials=2), "other than the 2 samples"),
        (FakeJobs(result("a"), result("a")), "more than once"),
        (FakeJobs(result("a"), result("b"), result("c"), n_total_trials=2), "other than the 2"),
        (FakeJobs(result("a"), result("b", "tasks/x")), "not asked for"),
        (FakeJobs(n_total_trials=2), "other than the 2 samples"),
    ],
)
async def test_trials_that_are_not_those_asked_for_are_refused(
    tmp_path: Path, jobs: FakeJobs, words: str
) -> None:
    """A retry that is counted as a sample shifts a whole group."""
    with pytest.raises(ContractError, match=words):
        await adapter(tmp_path, run_job=jobs).generate(
            [spec()], run_id="r", attempts=2, concurrency=1
        )


async def test_job_that_was_stopped_says_what_is_missing(tmp_path: Path) -> None:
    """A cap ends the job with what it has."""
    jobs = FakeJobs(result("a"), n_total_trials=3, stopped="cost: 2 of 1 USD", n_retries=0)

    made = await adapter(tmp_path, run_job=jobs).generate(
        [spec()], run_id="r", attempts=3, concurrency=1
    )

    assert made.stopped == "cost: 2 of 1 USD"
    assert (len(made.groups[0].rollouts), made.groups[0].missing) == (1, 2)


async def test_evaluation_gives_rewards_only(tmp_path: Path) -> None:
    """And takes a missing one for what it is."""
    trials = [
        result("a", verifier_result={"rewards": {"reward": 0.5}}),
        result("b", exception_info=FAILED),
        result("c", verifier_result={"rewards": {"style": 1.0}}),
    ]
    made = await adapter(tmp_path, run_job=FakeJobs(*trials), policy=None).evaluate(
        [spec(split="eval")], run_id="r", attempts=3, concurrency=1
    )

    assert [(one.trial_name, one.key, one.reward) for one in made.records] == [
        ("a", "sum", 0.5),
        ("b", "sum", None),
        ("c", "sum", None),
    ]
    assert made.records[1].failure == "AgentTimeoutError: 600 s"
    assert made.records[2].failure == "has no finite 'reward'"
    assert not any("token" in name for record in made.records for name in vars(record))
    with pytest.raises(ContractError, match="wrong split"):
        await adapter(tmp_path, run_job=FakeJobs(*trials)).evaluate(
            [spec()], run_id="s", attempts=3, concurrency=1
        )


async def test_preflight_raises_the_first_gate_that_is_not_passed(tmp_path: Path) -> None:
    """Before thousands of trials are run that may not be trained on."""
    good = await adapter(tmp_path, run_job=FakeJobs(result())).preflight(spec(), run_id="p")
    assert good.reward == 1.0

    with pytest.raises(ContractError, match="log-probabilities"):
        await adapter(tmp_path, run_job=FakeJobs(result(**_detail(logprobs=None)))).preflight(
            spec(), run_id="q"
        )


async def test_preflight_runs_once_before_the_first_job(tmp_path: Path) -> None:
    """One attempt of one small task, under an id of its own."""
    small, jobs = RLTask("small", "train", "tasks/small"), FakeJobs()

    async def run_job(config: Any) -> Any:
        jobs.trials = [result(config["job_name"], config["tasks"][0]["path"])]
        return await jobs(config)

    made = adapter(tmp_path, run_job=run_job, preflight_task=small)
    for run_id in ("first", "second"):
        await made.generate([spec()], run_id=run_id, attempts=1, concurrency=1)

    assert [one["job_name"] for one in jobs.configs] == ["first.preflight", "first", "second"]
    assert jobs.configs[0]["n_attempts"] == 1


async def test_first_big_job_is_preceded_by_one_attempt_of_its_first_task(tmp_path: Path) -> None:
    """Where nobody has named a small one; small jobs need none."""
    jobs = FakeJobs()

    async def run_job(config: Any) -> Any:
        count = config["n_attempts"]
        path = config["tasks"][0]["path"]
        jobs.trials = [result(f"{config['job_name']}-{one}", path) for one in range(count)]
        return await jobs(config)

    made = adapter(tmp_path, run_job=run_job)
    for run_id, attempts in (("small", 1), ("big", BIG_JOB), ("bigger", BIG_JOB + 1)):
        await made.generate([spec()], run_id=run_id, attempts=attempts, concurrency=1)

    assert [(one["job_name"], one["n_attempts"]) for one in jobs.configs] == [
        *(("small", 1), ("big.preflight", 1), ("big", BIG_JOB), ("bigger", BIG_JOB + 1)),
    ]


async def test_job_whose_preflight_fails_is_not_run(tmp_path: Path) -> None:
    """The gate is named, and no money is spent; the next try is checked again."""
    jobs = FakeJobs(result(**_detail(logprobs=None)))
    made = adapter(tmp_path, run_job=jobs, preflight_task=spec())

    for run_id in ("r", "s"):
        with pytest.raises(ContractError, match="log-probabilities"):
            await made.generate([spec("other")], run_id=run_id, attempts=100, concurrency=1)
    assert [one["job_name"] for one in jobs.configs] == ["r.preflight", "s.preflight"]


async def test_job_without_harbor_says_what_to_install(tmp_path: Path) -> None:
    """The adapter is imported without Harbor, and a job may run elsewhere."""
    with pytest.raises(CapabilityError, match="pip install harbor"):
        await run_harbor_job({}, Caps())
    with pytest.raises(CapabilityError, match="run_job"):
        await adapter(tmp_path).generate([spec()], run_id="r", attempts=1, concurrency=1)


def _watch(directory: Path, **caps: Any) -> Watch:
    watch = Watch(Caps(**caps), directory)
    for number in range(4):
        failed = {"exception_info": FAILED} if number % 2 else {}
        cost = {"agent_result": AGENT_RESULT | {"cost_usd": 0.25}}
        watch.add(result(f"t{number}", **cost, **failed))
    return watch


@pytest.mark.parametrize(
    ("caps", "words"),
    [
        ({}, None),
        ({"cost_usd": 1.0}, None),
        ({"cost_usd": 0.99}, "cost: 1.00 of 0.99 USD"),
        ({"wall_s": 3600}, None),
        ({"wall_s": 0}, "time: "),
        ({"failure_rate": 0.5, "failures_from": 4}, None),
        ({"failure_rate": 0.4, "failures_from": 4}, "failures: 2 of 4 trials, more than 40%"),
        ({"failure_rate": 0.4}, None),
        ({"disk_bytes": 1 << 20}, None),
        ({"disk_bytes": 100}, "disk: "),
    ],
)
def test_cap_is_told_once_it_is_exceeded(
    tmp_path: Path, caps: dict[str, Any], words: str | None
) -> None:
    """A job that runs away costs money, and a full disk costs everybody's results."""
    (tmp_path / "t0").mkdir()
    (tmp_path / "t0" / "log").write_bytes(b"x" * 5000)

    told = _watch(tmp_path, **caps).exceeded()

    assert told is None if words is None else str(told).startswith(words)


def test_try_that_was_made_again_counts_its_cost_and_no_trial(tmp_path: Path) -> None:
    """What the first try cost is spent; what it failed of is no failure of the job's."""
    watch = Watch(Caps(), tmp_path)
    watch.add(result("a", exception_info=FAILED, agent_result=AGENT_RESULT | {"cost_usd": 1.0}))
    watch.add(result("a", agent_result=AGENT_RESULT | {"cost_usd": 0.5}))

    nobody_knows = AGENT_RESULT | {"cost_usd": float("nan")}
    watch.add(result("b", agent_result=nobody_knows))

    assert (len(watch.ended), watch.retries, watch.cost_usd) == (2, 1, 1.5)
    assert watch.ended["a"]["exception_info"] is None


def test_import_of_the_adapter_loads_nothing_heavy() -> None:
    """A trainer imports it beside its own torch."""
    script = "import coldframe.integrations.harbor_rl, sys; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    heavy = {
        "harbor",
        "litellm",
        "torch",
        "kubernetes",
        "httpx",
        "coldframe.node",
        "coldframe.host",
    }
    assert not heavy & set(ended.stdout.split())
