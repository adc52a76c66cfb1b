"""What a real attempt's trajectory holds: every field of the list in docs/trajectories.md."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.harnesses.base import ModelSettings
from coldframe.host.wire import VERSION as SPAWNER_PROTOCOL
from coldframe.node import inside_calls
from coldframe.protocol import PROTOCOL_VERSION
from coldframe.rollouts.load import load_task
from coldframe.rollouts.record import package_version
from coldframe.rollouts.verifier import VERSION as VERIFIER_VERSION
from coldframe.trajectories.files import ChangedFiles
from coldframe.trajectories.schema import Termination, Trajectory
from coldframe.trajectories.steps import CallOutcome, Step
from coldframe.trajectories.store import BlobStore
from tests.doubles.model_endpoint import Bash, ModelEndpoint, Say
from tests.fixtures.egress import OTHER, WEB, Internet, hello
from tests.fixtures.waiting import until_asked
from tests.integration.rollouts.conftest import RunAttempt, all_begun
from tests.integration.rollouts.test_attempt import make_task

pytestmark = pytest.mark.root


def told(files: ChangedFiles | None) -> dict[object, str]:
    assert files is not None
    return {str(one.path): one.change.value for one in files.entries}


def committed(tree: Path) -> str:
    """Put a tree under git, and return the commit's id."""
    git = ("git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q"], ["add", "one"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout.strip()


async def by_model(
    run_attempt: RunAttempt, directory: Path, *replies: Bash | Say, **known: str | float
) -> Trajectory:
    with ModelEndpoint({"Do one": [*replies, Say("Done.")]}) as endpoint:
        model = ModelSettings("policy", endpoint.base_url, **known)  # type: ignore[arg-type]
        return await run_attempt(directory, "react", model=model, seed=5)


# --- files ----------------------------------------------------------------------------


async def test_each_step_says_what_became_of_the_files(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Which command wrote what is the first question to a trajectory."""
    secret = "sk-very-secret-word"
    trajectory = await by_model(
        run_attempt,
        make_task(tmp_path, toml=f'env = {{ API_KEY = "{secret}" }}\n'),
        Bash("mkdir /d; echo one > /d/f; printf x > $(printf '/d/\\377'); touch /d/$API_KEY"),
        Bash("true", "echo two > /d/f; chmod 700 /d; rm /etc/motd; rm /d/sk*"),
    )

    first, second = trajectory.steps[:2]
    assert trajectory.failure is None
    odd = str({"base64": base64.b64encode(b"/d/\xff").decode()})
    assert told(first.calls[0].files) == {
        "/d": "created",
        "/d/f": "created",
        "/d/[redacted]": "created",
        odd: "created",
    }
    assert told(second.calls[0].files) == {}
    assert told(second.calls[1].files) == {
        "/d": "changed",
        "/d/f": "changed",
        "/etc/motd": "removed",
        "/d/[redacted]": "removed",
    }
    file = next(one for one in second.calls[1].files.entries if one.path == "/d/f")
    assert (file.size, file.sha256) == (4, hashlib.sha256(b"two\n").hexdigest())
    agent = next(one for one in trajectory.phases if one.name == "agent")
    assert told(agent.files) == {}
    assert "times of files" in trajectory.files_excluded
    looks = [call.files for step in trajectory.steps for call in step.calls] + [agent.files]
    assert all(one.from_at <= one.to_at for one in looks)
    assert [one.from_at for one in looks[1:]] == [one.to_at for one in looks[:-1]]
    assert not [name for name in trajectory.unknown if name.endswith("files")]


async def test_files_of_what_runs_on_are_of_the_step_that_saw_them(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """A record is of the sandbox between two instants, not of who wrote."""
    trajectory = await by_model(
        run_attempt,
        make_task(tmp_path),
        Bash("(until [ -e /go ]; do sleep 0.01; done; echo > /late) > /dev/null 2>&1 &"),
        Bash("touch /go; until [ -e /late ]; do sleep 0.01; done"),
    )

    assert told(trajectory.steps[0].calls[0].files) == {}
    assert told(trajectory.steps[1].calls[0].files) == {"/go": "created", "/late": "created"}


async def test_files_of_a_command_that_was_interrupted_are_the_phases(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """What an agent did with its last second is looked at once it is dead."""
    directory = make_task(
        tmp_path,
        toml="[agent]\ntimeout_sec = 0.7\n",
        solution__solve_sh="#!/bin/sh\ntouch /done; sleep 100\n",
    )
    trajectory = await run_attempt(directory)

    (call,) = trajectory.steps[0].calls
    assert trajectory.termination is Termination.AGENT_DEADLINE
    assert (call.outcome, call.files) == (CallOutcome.INTERRUPTED, None)
    assert "no look was taken" in trajectory.unknown["steps.0.calls.0.files"]
    agent = next(one for one in trajectory.phases if one.name == "agent")
    assert told(agent.files)["/done"] == "created"


async def test_looks_that_tell_nothing_are_said_and_given_up(
    run_attempt: RunAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with a million files must not slow every further step, nor lose its grade."""
    monkeypatch.setattr(inside_calls, "CHANGES_S", 0.0)
    directory = make_task(tmp_path)
    trajectory = await by_model(run_attempt, directory, Bash("true", "true", "touch /done"))

    reasons = [trajectory.unknown[f"steps.0.calls.{number}.files"] for number in range(3)]
    assert trajectory.rewards == {"reward": 1.0}
    assert [one.files for one in trajectory.steps[0].calls] == [None] * 3
    assert ["within 0 s" in one for one in reasons] == [True, True, False]
    assert "3 looks in a row" in reasons[2]
    assert "3 looks in a row" in trajectory.unknown["phases.1.files"]


# --- the whole list -------------------------------------------------------------------


async def test_trajectory_holds_every_field_of_the_designs_list(
    internet: Internet,
    run_attempt: RunAttempt,
    native_async_client: AsyncSandboxClient,
    tmp_path: Path,
) -> None:
    """What is missing here can never be learnt again of an attempt that is over."""
    await internet.serve(WEB, 7, hello)
    directory = make_task(
        tmp_path,
        toml=f'[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{WEB}"]\n',
    )
    commit = committed(tmp_path)
    reach = "python3 -c \"import socket; socket.create_connection(('{}', 7), 5)\""
    noisy = "head -c 30000 /dev/zero | tr '\\0' x; echo lost >&2; exit 3"
    trajectory = await by_model(
        run_attempt,
        directory,
        Bash(noisy),
        Bash(f"{reach.format(WEB)}; {reach.format(OTHER)}; touch /done"),
        temperature=0.5,
        policy_version="7",
        tokenizer="bytes@1",
        renderer="tags@1",
    )

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
    task, details = load_task(directory), (await native_async_client.capabilities()).details
    one = trajectory.identity
    assert one.run_id == "run-test"
    assert (one.task.key, one.task.name, one.task.digest) == (task.key, task.name, task.digest)
    assert (one.sample, one.attempt, one.seed) == (1, 0, 6)
    assert re.fullmatch(r"[0-9a-f]{32}", one.trace_id)
    assert one.sandbox_id and one.sandbox_id.startswith("sb-")
    assert one.image and one.image.digest and one.image.layers
    assert one.initial_state and one.initial_state.files
    assert one.task.repository_commit == commit
    assert one.model and (one.model.name, one.model.sampling) == ("policy", {"temperature": 0.5})
    assert one.model.reported_name == "policy-scripted"
    known = (one.model.policy_version, one.model.tokenizer, one.model.renderer)
    assert known == ("7", "bytes@1", "tags@1")
    assert (one.harness.name, one.harness.version) == ("react", "3")
    assert one.harness.settings["limits"]["steps"] == 100
    assert one.harness.tool_schemas[0]["function"]["name"] == "bash"
    assert (one.verifier.name, one.verifier.version) == ("shared", VERIFIER_VERSION)
    assert one.verifier.digest == task.tests_digest
    versions = one.versions
    assert versions.client == package_version()
    assert versions.protocol == PROTOCOL_VERSION
    assert versions.spawner_protocol == SPAWNER_PROTOCOL == details["spawner_protocol"]
    assert versions.injected_binary_sha256 == details["injected_binary_sha256"]
    assert versions.node and versions.node in one.sandbox_id
    assert (versions.runtime, versions.kernel) == ("native", os.uname().release)

    blobs = BlobStore(tmp_path / "blobs")
    prompt = [json.loads(blobs.get(ref)) for ref in one.harness.prompt]
    assert [message["role"] for message in prompt] == ["system", "user"]
    first, second, last = trajectory.steps
    _holds_an_exec(first, blobs)
    assert second.calls[0].files and second.calls[0].files.created >= 1
    agent = next(phase for phase in trajectory.phases if phase.name == "agent")
    decided = {(e.address, e.decision.value, e.step) for e in agent.egress.events if e.address}
    assert {(WEB, "allowed", 1), (OTHER, "refused", 1)} <= decided
    assert last.finish_reason == "stop" and not last.calls
    ends = [time for step in trajectory.steps for time in (step.started_at, step.ended_at)]
    assert ends == sorted(ends)
    assert trajectory.started_at <= ends[0] and ends[-1] <= trajectory.ended_at

    times, totals = trajectory.times, trajectory.totals
    assert times.exec_s == pytest.approx(sum(c.exec_s for s in trajectory.steps for c in s.calls))
    assert times.model_s == pytest.approx(sum(step.model_s for step in trajectory.steps))
    assert min(times.create_s, times.verify_s, times.delete_s, times.image_s) > 0
    assert times.total_s == pytest.approx(times.run_s + times.other_s)
    assert (totals.steps, totals.calls) == (3, 2)
    assert totals.cpu_s and totals.memory_peak_bytes
    assert trajectory.reward_schema_version == "coldframe.reward/1"
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.final_state and trajectory.file_diff and trajectory.file_diff.changed
    assert set(trajectory.unknown) == {"token_ids"}


def _holds_an_exec(step: Step, blobs: BlobStore) -> None:
    """The action, the request, both streams whole, the window shown, times and resources."""
    (call,) = step.calls
    assert step.action and b"tool_calls" in blobs.get(step.action)
    assert call.operation_id.startswith("op-")
    assert (call.request["cwd"], call.request["user"]) == ("/", "0")
    assert (call.reason, call.exit_code, call.signal) == ("exit", 3, None)
    assert call.stdout and call.stderr
    assert (call.stdout.total_bytes, call.stdout.complete) == (30_000, True)
    assert call.stdout.sha256 == hashlib.sha256(b"x" * 30_000).hexdigest()
    assert blobs.get(call.stderr.stored) == b"lost\n"
    shown = step.shown[0].shown
    assert shown.rule.startswith("head_tail_10k@")
    assert shown.omitted_characters > 0
    assert len(blobs.get(shown.text)) < 30_000
    assert call.resources and call.resources.cpu_user_s is not None
    assert call.started_at <= call.ended_at
    assert (call.exec_s > 0, call.queue_s >= 0, step.model_s > 0) == (True, True, True)
    assert step.model_queue_s is not None and step.model_attempts == 1
    assert step.usage.completion_tokens is not None


async def test_trajectorys_trace_is_that_of_its_sandbox(
    run_attempt: RunAttempt, native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """By it an attempt is found again in the logs and events of the service."""
    trajectory = await run_attempt(make_task(tmp_path))

    events = [one async for one in native_async_client.events("oldest", follow=False)]
    of_sandbox = [one for one in events if one.sandbox_id == trajectory.identity.sandbox_id]
    assert [one.state.value for one in of_sandbox][-1] == "deleted"
    assert {one.trace_id for one in of_sandbox} == {trajectory.identity.trace_id}


async def test_what_is_not_known_of_an_attempt_is_said(
    run_attempt: RunAttempt, native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """An empty field must not be taken for "there was none"; a failure says what it rests on."""
    directory = make_task(tmp_path, solution__solve_sh="#!/bin/sh\ntouch /begun; sleep 1000\n")
    model = await by_model(run_attempt, directory, Bash("true"))
    running = asyncio.create_task(run_attempt(directory))
    await until_asked(lambda: all_begun(native_async_client, 1))
    (sandbox,) = await native_async_client.list_sandboxes()
    await sandbox.delete()
    gone = await running

    told = ("policy_version", "tokenizer", "renderer")
    assert {f"identity.model.{name}" for name in told} <= set(model.unknown)
    assert {"identity.task.repository_commit", "identity.seed"} <= set(gone.unknown)
    assert {"final_state", "steps.0.calls.0.files", "phases.1.egress"} <= set(gone.unknown)
    assert gone.failure and gone.failure.phase == "agent"
    assert gone.failure.evidence["sandbox_id"] == gone.identity.sandbox_id
    assert gone.failure.evidence["sandbox_state"] == "deleted"
