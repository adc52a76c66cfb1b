"""A job was written by others: what is wrong in it is named, and costs no other trial."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldframe.integrations.harbor_trials import (
    AtifExportError,
    ImportRefusedError,
    import_job,
    to_atif,
)
from coldframe.integrations.harbor_trials import reading as bounds
from coldframe.protocol.errors import RunError, Side
from coldframe.rollouts.directory import RunDirectory
from coldframe.trajectories.schema import Termination, Trajectory
from coldframe.trajectories.store import BlobStore
from tests.unit.integrations.atif_samples import (
    COMPLETIONS,
    LOGPROBS,
    MESSAGES,
    PROMPTS,
    journal,
    modelled,
)

Json = dict[str, Any]
SECRET = "sk-should-not-be-kept"
REWARDED_TWICE = '{"verifier_result": {"rewards": {"reward": 0.0, "reward": 1.0}}}'


def result(name: str = "one__abc", **changes: Any) -> Json:
    """Return a result.json as Harbor 0.18 writes it."""
    return {
        "id": "0c1c8aea-63c5-4cc4-9ed7-e841751eedfd",
        "task_name": "demo/one",
        "trial_name": name,
        "trial_uri": "file:///etc",
        "task_id": {"path": "/etc"},
        "task_checksum": "ab" * 32,
        "config": {
            "task": {"path": "/etc", "git_commit_id": "c0ffee"},
            "agent": {"model_name": "openai/m", "kwargs": {"api_key": SECRET, "max_turns": 3}},
        },
        "agent_info": {"name": "terminus-2", "version": "2.0.0", "model_info": {"name": "m"}},
        "verifier_result": {"rewards": {"reward": 1.0}},
        "exception_info": None,
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:01:00Z",
        "environment_setup": {
            "started_at": "2026-01-01T00:00:00Z",
            "finished_at": "2026-01-01T00:00:02Z",
        },
        "agent_execution": {"started_at": "2026-01-01T00:00:02Z", "finished_at": None},
        "verifier": {"started_at": "2026-01-01T00:00:50Z", "finished_at": "2026-01-01T00:00:53Z"},
        **changes,
    }


def atif(*messages: str, version: str = "ATIF-v1.7", **more: Any) -> Json:
    steps: list[Json] = [{"step_id": 1, "source": "user", "message": "Do it."}]
    for number, text in enumerate(messages, start=2):
        steps.append(
            {
                "step_id": number,
                "source": "agent",
                "message": text,
                "tool_calls": [{"tool_call_id": "c", "function_name": "sh", "arguments": {}}],
                "observation": {"results": [{"source_call_id": "c", "content": f"did {text}"}]},
                "metrics": {"prompt_tokens": 10, "completion_tokens": 2},
            }
        )
    agent = {"name": "terminus-2", "version": "2.0.0"}
    return {"schema_version": version, "agent": agent, "steps": steps, **more}


def write(job: Path, trial: Json, conversation: Json | None = None, **files: str | Json) -> Path:
    """Write a job with one trial more; a `__` in a name is a `/`."""
    job.mkdir(exist_ok=True)
    (job / "config.json").write_text('{"job_name": "j"}')
    (job / "lock.json").write_text('{"harbor": {"version": "0.18.0"}}')
    root = job / str(trial.get("trial_name", "nameless"))
    everything = {"result.json": trial, **files}
    if conversation is not None:
        everything["agent__trajectory.json"] = conversation
    for name, value in everything.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return root


def imported(tmp_path: Path) -> Trajectory:
    """Import the job and return its one attempt."""
    report = import_job(tmp_path / "job", tmp_path / "run")
    assert report.refused == []
    (one,) = report.attempts.values()
    return one


def test_trial_becomes_an_attempt_and_what_is_missing_is_marked(tmp_path: Path) -> None:
    """Nothing is guessed: neither a digest, nor a time, nor the number of commands."""
    write(tmp_path / "job", result(), atif("a", "b"))

    one = imported(tmp_path)

    assert one.rewards == {"reward": 1.0}
    assert (one.identity.task.key, one.identity.task.name) == ("demo-one", "demo/one")
    assert one.identity.task.repository_commit == "c0ffee"
    assert one.origin is not None
    assert one.origin.runner_version == one.identity.verifier.version == "0.18.0"
    assert one.termination is Termination.UNKNOWN
    assert (one.times.create_s, one.times.verify_s, one.times.total_s) == (2.0, 3.0, 60.0)
    assert one.times.model_s is one.times.run_s is None
    assert (one.totals.steps, one.totals.completion_tokens, one.totals.calls) == (2, 4, None)
    assert one.identity.harness.settings == {"api_key": "[redacted]", "max_turns": 3}
    for name in ("identity.task.digest", "identity.image", "times.exec_s", "steps[].calls"):
        assert one.unknown[name]
    blobs = BlobStore(tmp_path / "run" / "blobs")
    assert [blobs.get(step.shown[0].shown.text) for step in one.steps] == [b"did a", b"did b"]
    assert SECRET not in (tmp_path / "run/attempts/demo-one.0.0/trajectory.json").read_text()


def test_samples_are_numbered_by_their_begin_and_again_changes_nothing(tmp_path: Path) -> None:
    """The same job comes to the same attempts; another job is refused."""
    job, run = tmp_path / "job", tmp_path / "run"
    write(job, result("a__1", started_at="2026-01-01T00:00:09Z"))
    write(job, result("b__2", started_at="2026-01-01T00:00:01Z"))
    write(job, result("c__3", task_name="demo_one"))

    first = import_job(job, run)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*.json"))}
    again = import_job(job, run)

    assert first.keys == {"a__1": "demo-one.1.0", "b__2": "demo-one.0.0", "c__3": "demo_one.0.0"}
    assert again.document() == first.document()
    assert {path: path.read_bytes() for path in sorted(run.rglob("*.json"))} == before
    write(job, result("d__4"))
    with pytest.raises(RunError, match="d__4"):
        import_job(job, run)


def test_tasks_whose_names_differ_in_what_no_key_holds_stay_apart(tmp_path: Path) -> None:
    """Else samples of two tasks would be one group."""
    write(tmp_path / "job", result("a__1", task_name="x/y"))
    write(tmp_path / "job", result("b__2", task_name="x-y"))

    report = import_job(tmp_path / "job", tmp_path / "run")

    assert sorted(report.keys.values()) == ["x-y-2.0.0", "x-y.0.0"]


def raised(kind: str, **changes: Any) -> Json:
    info = {"exception_type": kind, "exception_message": "m", "exception_traceback": "t"}
    return result(exception_info=info, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "side", "code"),
    [
        ("RewardFileNotFoundError", {"verifier_result": None}, "verifier", "reward_missing"),
        ("VerifierTimeoutError", {}, "verifier", "verifier_deadline"),
        ("EnvironmentStartTimeoutError", {}, "startup", "boot_deadline"),
        ("NonZeroAgentExitCodeError", {}, "harness", "harness_failed"),
        ("RateLimitError", {}, "inference", "inference_failed"),
        ("WhoKnowsError", {}, "verifier", "verifier_crashed"),
        ("WhoKnowsError", {"verifier": None}, "harness", "harness_crashed"),
        ("WhoKnowsError", {"verifier": None, "agent_execution": None}, "startup", None),
    ],
)
def test_exception_becomes_a_failure_of_its_side_and_never_a_reward(
    tmp_path: Path, kind: str, changes: Json, side: str, code: str | None
) -> None:
    """By its class; by the phase that had begun last where the class says nothing."""
    write(tmp_path / "job", raised(kind, **changes))

    one = imported(tmp_path)

    assert one.rewards is None
    assert one.failure is not None
    assert (one.failure.side, code or one.failure.code) == (Side(side), one.failure.code)
    assert one.failure.evidence["exception"] == kind


@pytest.mark.parametrize(
    ("kind", "message", "side", "code"),
    [
        ("RewardFileNotFoundError", "m [coldframe reward_missing]", "verifier", "reward_missing"),
        ("HealthcheckError", "m [coldframe unhealthy]", "startup", "unhealthy"),
        ("CapacityError", "the node is full", "startup", "capacity"),
    ],
)
def test_failure_of_our_own_environment_keeps_its_code(
    tmp_path: Path, kind: str, message: str, side: str, code: str
) -> None:
    """By both roads it is the same failure."""
    info = {"exception_type": kind, "exception_message": message}
    write(tmp_path / "job", result(exception_info=info))

    one = imported(tmp_path)

    assert one.failure is not None
    assert (one.failure.side, one.failure.code) == (Side(side), code)


def test_agent_that_ran_out_of_time_is_judged_by_what_it_left(tmp_path: Path) -> None:
    """As an attempt of ours is: its own failure, with the verifier's reward."""
    write(tmp_path / "job", raised("AgentTimeoutError"))

    one = imported(tmp_path)

    assert one.rewards == {"reward": 1.0}
    assert one.termination is Termination.AGENT_DEADLINE
    assert one.policy_failure is not None


@pytest.mark.parametrize(
    ("rewards", "files", "code"),
    [
        (None, {}, "reward_missing"),
        ({}, {}, "reward_missing"),
        ({"reward": None}, {}, "reward_invalid"),
        ({"reward": True}, {}, "reward_invalid"),
        ({"reward": "1"}, {}, "reward_invalid"),
        ({"reward": 1.0}, {"verifier__reward.json": '{"reward": true}'}, "reward_invalid"),
        ({"reward": 1.0}, {"verifier__reward.txt": "0"}, "reward_invalid"),
        (
            {"reward": 1.0},
            {"verifier__reward.txt": "0", "verifier__reward.json": "1"},
            "reward_invalid",
        ),
    ],
)
def test_verdict_that_is_none_is_never_taken_for_one(
    tmp_path: Path, rewards: Any, files: dict[str, str], code: str
) -> None:
    """Missing is not 0, text is no number, and two files may be the agent's and the verifier's."""
    verdict = None if rewards is None else {"rewards": rewards}
    write(tmp_path / "job", result(verifier_result=verdict), **files)

    one = imported(tmp_path)

    assert one.rewards is None
    assert one.failure is not None
    assert (one.failure.side, one.failure.code) == (Side.VERIFIER, code)


def link(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    elsewhere = path.parent.parent.parent / "elsewhere"
    elsewhere.write_bytes(content)
    path.symlink_to(elsewhere)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("spoil", "field", "problem"),
    [
        (link, "", "links are not followed"),
        (fifo, "", "no regular file"),
        (directory, "", "no regular file"),
        (put("{"), "", "not JSON"),
        (put(json.dumps(result(task_name="half a pair: \ud800"))), "", "no Unicode"),
        (put("[" * 100_000), "", "not JSON"),
        (put('{"id": NaN}'), "", "holds NaN"),
        (put(REWARDED_TWICE), "", "the key 'reward' more than once"),
        (put("[]"), "", "valid dictionary"),
        (put(json.dumps(result(task_name=7))), "task_name", "valid string"),
        (put(json.dumps(result(agent_info={"name": "a"}))), "agent_info.version", "required"),
        (put(json.dumps(result(started_at="soon"))), "started_at", "datetime"),
        (Path.unlink, "", "did not end"),
    ],
)
def test_trial_that_cannot_be_read_is_refused_by_file_and_field(
    tmp_path: Path, spoil: Callable[[Path], Any], field: str, problem: str
) -> None:
    """And its neighbour is imported."""
    bad = write(tmp_path / "job", result("bad__1"))
    write(tmp_path / "job", result("good__2"))
    spoil(bad / "result.json")

    report = import_job(tmp_path / "job", tmp_path / "run")

    assert [*report.attempts] == ["good__2"]
    (refused,) = report.refused
    assert refused["file"] == "bad__1/result.json"
    assert refused["field"] == field
    assert problem in refused["problem"]
    kept = json.loads((tmp_path / "run" / "import.json").read_text())
    assert kept["refused"] == report.refused


@pytest.mark.parametrize("name", ["agent", "verifier"])
def test_directory_that_is_a_link_is_not_entered(tmp_path: Path, name: str) -> None:
    """What lies behind it is not the trial's."""
    root = write(tmp_path / "job", result())
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "trajectory.json").write_text(json.dumps(atif("secret")))
    (tmp_path / "secret" / "reward.txt").write_text("1")
    (root / name).symlink_to(tmp_path / "secret")

    report = import_job(tmp_path / "job", tmp_path / "run")

    told = json.dumps(report.document())
    assert "links are not followed" in told
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "run").rglob("blobs/*/*"))


def test_files_over_the_bounds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job cannot fill this process's memory."""
    write(tmp_path / "job", result("a__1"), atif("a"))
    write(tmp_path / "job", result("b__2", source="x" * 3000))
    monkeypatch.setattr(bounds.Folder.read, "__kwdefaults__", {"limit": 2500})

    report = import_job(tmp_path / "job", tmp_path / "run")

    assert [*report.attempts] == ["a__1"]
    assert [one["problem"] for one in report.refused] == ["is over 2500 bytes"]


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        ({"schema_version": "ATIF-v1.7"}, "agent: Field required"),
        (atif("a", version="ATIF-v2.0"), "schema_version"),
        (atif("a", more=1), "more: Extra inputs"),
        (atif(), None),
        ({**atif("a"), "steps": []}, "steps"),
        (
            {**atif("a"), "steps": [{"step_id": 1, "source": "root", "message": ""}]},
            "steps.0.source",
        ),
        (atif("a", continued_trajectory_ref="../../../etc/passwd"), "leads out of the trial"),
        (atif("a", continued_trajectory_ref="/etc/passwd"), "leads out of the trial"),
        (atif("a", continued_trajectory_ref="trajectory.json"), "is referred to twice"),
        (atif("a", subagent_trajectories=[atif("s")]), "trajectory_id"),
    ],
)
def test_conversation_that_is_no_atif_costs_the_steps_and_says_so(
    tmp_path: Path, conversation: Json, problem: str | None
) -> None:
    """The verdict stands; no steps would mean something else."""
    write(tmp_path / "job", result(), conversation)

    one = imported(tmp_path)

    assert one.steps == ()
    assert one.rewards == {"reward": 1.0}
    if problem is None:
        assert "steps" not in one.unknown
    else:
        assert problem in one.unknown["steps"]
        assert "agent/trajectory.json" in one.unknown["steps"]


def test_continuations_and_sub_agents_keep_owner_and_order_and_nothing_is_told_twice(
    tmp_path: Path,
) -> None:
    """Copied context is a step once; what a sub-agent did is none of the conversation's."""
    inner = atif("of the sub-agent", trajectory_id="sub-1")
    main = atif("a", continued_trajectory_ref="more.json", subagent_trajectories=[inner])
    reference = {"trajectory_id": "sub-1"}, {"trajectory_path": "beside.json"}
    main["steps"][1]["observation"]["results"].append({"subagent_trajectory_ref": [*reference]})
    main["steps"][1]["observation"]["results"].append(
        {"subagent_trajectory_ref": [{"trajectory_path": "gone.json"}]}
    )
    more = atif("a", "b")
    for step in more["steps"][:2]:
        step["is_copied_context"] = True
    write(
        tmp_path / "job",
        result(),
        main,
        **{"agent__more.json": more, "agent__beside.json": atif("beside")},
    )

    one = imported(tmp_path)

    blobs = BlobStore(tmp_path / "run" / "blobs")
    assert [blobs.get(step.shown[0].shown.text) for step in one.steps] == [b"did a", b"did b"]
    assert one.origin is not None
    assert [
        (document.path, document.kind, document.owner, document.order, document.copied_steps)
        for document in one.origin.documents
    ] == [
        ("agent/trajectory.json", "main", None, 0, 0),
        ("agent/trajectory.json#sub-1", "sub_agent", "agent/trajectory.json", 1, 0),
        ("agent/beside.json", "sub_agent", "agent/trajectory.json", 2, 0),
        ("agent/more.json", "continuation", "agent/trajectory.json", 3, 2),
    ]
    assert any("gone.json" in warning for warning in one.warnings)


def test_steps_of_a_task_keep_their_own_verdicts_and_their_exception_counts(
    tmp_path: Path,
) -> None:
    """Harbor books a step's exception with the step alone."""
    info = {"exception_type": "RuntimeError", "exception_message": "m"}
    parts: list[Json] = [
        {"step_name": "one", "verifier_result": {"rewards": {"reward": 0.5}}},
        {"step_name": "two", "verifier_result": {"rewards": {"reward": 1}}},
    ]
    files: dict[str, Any] = {"steps__one__agent__trajectory.json": atif("a", "b")}
    files["steps__two__agent__trajectory.json"] = atif("c")
    write(tmp_path / "job", result(step_results=parts), **files)
    one = imported(tmp_path)
    assert [(s.name, s.first_step, s.end_step, s.rewards) for s in one.task_steps] == [
        ("one", 0, 2, {"reward": 0.5}),
        ("two", 2, 3, {"reward": 1.0}),
    ]
    assert one.rewards == {"reward": 1.0}

    parts[0]["exception_info"] = info
    write(tmp_path / "other", result(step_results=parts), **files)
    report = import_job(tmp_path / "other", tmp_path / "other-run")
    (broken,) = report.attempts.values()
    assert broken.rewards is None
    assert broken.failure is not None
    assert "step one" in broken.failure.message


def test_step_whose_name_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """A name is a component of a path, and somebody else chose it."""
    parts = [{"step_name": "../../../etc", "verifier_result": None}]
    write(tmp_path / "job", result(step_results=parts))

    report = import_job(tmp_path / "job", tmp_path / "run")

    assert report.attempts == {}
    assert "no name of a file" in report.refused[0]["problem"]


def test_time_without_its_zone_is_not_known(tmp_path: Path) -> None:
    """It could be any hour."""
    write(tmp_path / "job", result(started_at="2026-01-01T00:00:00"))

    one = imported(tmp_path)

    assert one.started_at is one.times.total_s is None
    assert one.unknown["started_at"]
    assert one.ended_at == 1767225660.0


def test_what_is_no_job_is_refused(tmp_path: Path) -> None:
    """With what to name instead."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportRefusedError, match=r"has no config\.json; name the directory"):
        import_job(tmp_path / "empty", tmp_path / "run")
    with pytest.raises(ImportRefusedError, match="No such file"):
        import_job(tmp_path / "absent", tmp_path / "run")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(where=st.integers(0, 200), junk=JUNK)
def test_junk_anywhere_is_refused_by_name_or_kept(
    tmp_path_factory: pytest.TempPathFactory, where: int, junk: Any
) -> None:
    """Whatever stands in a field, no other error than the refusal comes out."""
    tmp_path = tmp_path_factory.mktemp("junk")
    trial, conversation = result(), atif("a", "b")
    places = [*_places(trial), *_places(conversation)]
    holder, key = places[where % len(places)]
    holder[key] = junk
    root = write(tmp_path / "job", result())
    (root / "result.json").write_text(json.dumps(trial))
    (root / "agent").mkdir()
    (root / "agent" / "trajectory.json").write_text(json.dumps(conversation))

    report = import_job(tmp_path / "job", tmp_path / "run")

    assert len(report.attempts) + len(report.refused) == 1
    for one in report.attempts.values():
        assert (one.rewards is None) != (one.failure is None)


def _places(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict | list):
        return []
    keys = range(len(value)) if isinstance(value, list) else [*value]
    inner = [place for key in keys for place in _places(value[key])]
    return [*((value, key) for key in keys), *inner]


def test_captured_attempt_is_exported_with_its_exact_tokens(tmp_path: Path) -> None:
    """Each with the step whose answer it is."""
    blobs = BlobStore(tmp_path / "blobs")

    made = to_atif(modelled(blobs), blobs, "one.0.0", journal(tmp_path))

    metrics = [one["metrics"] for one in made["steps"] if one["source"] == "agent"]
    assert [one["prompt_token_ids"] for one in metrics] == PROMPTS
    assert [one["completion_token_ids"] for one in metrics] == COMPLETIONS
    assert [one["logprobs"] for one in metrics] == LOGPROBS
    first = next(one for one in made["steps"] if one["source"] == "agent")
    assert first["tool_calls"][1]["arguments"] == {}
    assert first["tool_calls"][1]["extra"] == {"arguments": "{broken"}
    json.dumps(made, allow_nan=False).encode()


def test_calls_that_do_not_match_the_steps_give_no_tokens(tmp_path: Path) -> None:
    """Ids of another answer would be trained against this one's text."""
    blobs = BlobStore(tmp_path / "blobs")

    made = to_atif(modelled(blobs), blobs, "one.0.0", journal(tmp_path, MESSAGES[::-1]))

    assert not any("prompt_token_ids" in one.get("metrics", {}) for one in made["steps"])
    assert "do not match" in made["notes"]


def test_request_without_an_answer_is_no_step_of_the_agents(tmp_path: Path) -> None:
    """It never happened: the failure says so, and the answers before it keep their tokens."""
    blobs = BlobStore(tmp_path / "blobs")
    one = modelled(blobs)
    asked = one.steps[-1].model_copy(
        update={"index": len(one.steps), "action": None, "calls": (), "shown": ()}
    )

    made = to_atif(
        one.model_copy(update={"steps": (*one.steps, asked)}), blobs, "one.0.0", journal(tmp_path)
    )

    agents = [step for step in made["steps"] if step["source"] == "agent"]
    assert [step["metrics"]["completion_token_ids"] for step in agents] == COMPLETIONS
    assert f"step {asked.index}: the model gave no answer" in made["notes"]


def test_attempt_without_a_step_is_refused_by_name(tmp_path: Path) -> None:
    """ATIF holds none, and one that was made up would be a lie."""
    blobs = BlobStore(tmp_path / "blobs")
    one = modelled(blobs)
    nobody = one.identity.harness.model_copy(update={"prompt": ()})
    one = one.model_copy(
        update={"steps": (), "identity": one.identity.model_copy(update={"harness": nobody})}
    )

    with pytest.raises(AtifExportError, match=r"one\.0\.0: steps"):
        to_atif(one, blobs, "one.0.0")


def test_what_was_imported_is_exported_as_it_was(tmp_path: Path) -> None:
    """Step by step, without the numbers of the document that it came from."""
    document = atif("a", "b")
    write(tmp_path / "job", result(), document)
    one = imported(tmp_path)

    made = to_atif(one, RunDirectory(tmp_path / "run").blobs, "demo-one.0.0")

    assert made["steps"] == document["steps"]


@pytest.mark.parametrize("name", ["../" + "a" * 100_000, "\x1b[2J" * 50_000 + "/"])
def test_name_that_others_chose_is_told_short_and_harmless(tmp_path: Path, name: str) -> None:
    """A message goes into logs, onto terminals and into summaries, whoever wrote the name."""
    with (
        bounds.Folder.opened(tmp_path) as folder,
        pytest.raises(ImportRefusedError, match=r"\.\.\. \([0-9]+ characters\)") as refused,
    ):
        folder.read(name)

    assert len(str(refused.value)) < 2000
    assert str(refused.value).isprintable()
