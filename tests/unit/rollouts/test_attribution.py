"""Whose failure it was decides whether a policy is trained on it."""

from __future__ import annotations

import pytest

from coldframe.protocol import errors
from coldframe.protocol.errors import Side
from coldframe.rollouts.attribution import Phase, failure_of, may_retry, side_of
from coldframe.trajectories.redaction import Redactor


@pytest.mark.parametrize(
    ("error", "phase", "side"),
    [
        (errors.ImageNotFoundError("x"), Phase.CREATE, Side.CALLER),
        (errors.DockerfileError("x"), Phase.IMAGE, Side.CALLER),
        (errors.BuildStepError("x"), Phase.IMAGE, Side.STARTUP),
        (errors.CreateError("x"), Phase.CREATE, Side.STARTUP),
        (errors.CapacityError("x"), Phase.CREATE, Side.STARTUP),
        (errors.StorageFullError("x"), Phase.AGENT, Side.ENVIRONMENT),
        (errors.PathRefusedError("x"), Phase.SETUP, Side.STARTUP),
        (errors.SandboxGoneError("x"), Phase.AGENT, Side.ENVIRONMENT),
        (errors.SandboxGoneError("x"), Phase.VERIFY, Side.ENVIRONMENT),
        (errors.InferenceError("x"), Phase.AGENT, Side.INFERENCE),
        (errors.HarnessError("x"), Phase.AGENT, Side.HARNESS),
        (errors.InvalidRequestError("x"), Phase.AGENT, Side.HARNESS),
        (errors.FileError("x"), Phase.AGENT, Side.HARNESS),
        (errors.FileError("x"), Phase.VERIFY, Side.VERIFIER),
        (errors.UserNotFoundError("x"), Phase.VERIFY, Side.VERIFIER),
        (errors.RewardMissingError("x"), Phase.VERIFY, Side.VERIFIER),
        (errors.GradingPreventedError("x"), Phase.VERIFY, Side.POLICY),
        (KeyError("x"), Phase.AGENT, Side.HARNESS),
        (KeyError("x"), Phase.VERIFY, Side.VERIFIER),
        (KeyError("x"), Phase.CREATE, Side.STARTUP),
    ],
)
def test_side_follows_from_the_error_and_where_it_was_raised(
    error: Exception, phase: Phase, side: Side
) -> None:
    """The same file error is the harness's in its own upload and the verifier's in another."""
    assert side_of(error, phase) is side


def test_no_exception_is_ever_booked_on_the_policy_by_its_class() -> None:
    """Only the verifier judges a policy; a lost platform must not pass for a bad one."""
    for phase in Phase:
        for error in (errors.FileError("x"), errors.NotExecutedError("x"), OSError("x")):
            assert side_of(error, phase) is not Side.POLICY


def test_sandbox_that_ran_out_of_its_own_memory_is_the_policys_failure() -> None:
    """It has no reward either: there is nothing left to verify."""
    error = errors.SandboxGoneError("gone")
    evidence = {"sandbox_reason": "oom"}

    agent = failure_of(error, Phase.AGENT, Redactor(), evidence)
    verify = failure_of(error, Phase.VERIFY, Redactor(), evidence)

    assert (agent.side, agent.code) == (Side.POLICY, "sandbox_out_of_memory")
    assert verify.side is Side.ENVIRONMENT


def test_failure_carries_evidence_without_secrets() -> None:
    """A traceback may hold the key that a request was made with."""
    failure = failure_of(KeyError("sk-secret-key"), Phase.AGENT, Redactor(["sk-secret-key"]), {})

    assert failure.code == "harness_crashed"
    assert "sk-secret-key" not in failure.model_dump_json()
    assert "KeyError" in failure.evidence["traceback"]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (errors.CreateError("x"), True),
        (errors.SpawnerLostError("x"), True),
        (errors.StorageFullError("x"), False),
        (errors.CapabilityError("x"), False),
        (errors.SandboxGoneError("x"), False),
        (errors.InferenceError("x"), False),
        (errors.RewardMissingError("x"), False),
    ],
)
def test_only_passing_faults_of_the_platform_are_retried(error: Exception, again: bool) -> None:
    """Retrying anything else would choose among samples, and bias the group."""
    assert may_retry(failure_of(error, Phase.AGENT, Redactor(), {})) is again


@pytest.mark.parametrize(("reason", "again"), [("spawner lost", True), ("oom", False)])
def test_sandbox_that_went_with_its_node_is_tried_again(reason: str, again: bool) -> None:
    """No agent can end the spawner; every other end may be its doing."""
    evidence = {"sandbox_reason": reason}
    failure = failure_of(errors.SandboxGoneError("x"), Phase.VERIFY, Redactor(), evidence)

    assert failure.retryable is again


def test_full_disk_is_retried_only_before_the_agent_acted() -> None:
    """Later it may be the agent that filled it; a second chance would reward that."""
    error = errors.StorageFullError("x")

    assert may_retry(failure_of(error, Phase.CREATE, Redactor(), {}))
    assert not may_retry(failure_of(error, Phase.VERIFY, Redactor(), {}))
