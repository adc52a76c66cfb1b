"""Say whose failure an exception is, given where the attempt stood when it was raised.

The class of an error names the side that usually causes it. The phase corrects that: a file
error is the policy's own while the agent acts by the file API, and the verifier's while tests
are uploaded. Nothing here ever makes a reward of a failure.
"""

from __future__ import annotations

import traceback
from enum import StrEnum
from typing import Any

from coldframe.protocol.errors import (
    ColdframeError,
    GradingPreventedError,
    NotAuthenticatedError,
    NotPermittedError,
    RunError,
    SandboxGoneError,
    Side,
    StorageFullError,
)
from coldframe.trajectories.recorder import plain_text
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.schema import Failure

MAX_TEXT = 4000
SPAWNER_LOST = "spawner lost"
"""Why a sandbox is gone whose node failed; every other reason may be the agent's doing."""


class Phase(StrEnum):
    """Where an attempt stands."""

    IMAGE = "image"
    CREATE = "create"
    SETUP = "setup"
    STEP_SETUP = "step_setup"
    """Between two steps of a task: an agent has acted already."""
    AGENT = "agent"
    HANDOVER = "handover"
    """The harness is being killed and the final state taken."""
    VERIFY = "verify"


# Errors that are nobody's but the platform's stay so in every phase.
_PLATFORM = frozenset({Side.STARTUP, Side.ENVIRONMENT, Side.INFERENCE, Side.OBSERVATION})
_BEFORE_THE_AGENT = frozenset({Phase.IMAGE, Phase.CREATE, Phase.SETUP})
_OTHERWISE = {
    Phase.IMAGE: Side.STARTUP,
    Phase.CREATE: Side.STARTUP,
    Phase.SETUP: Side.STARTUP,
    Phase.STEP_SETUP: Side.STARTUP,
    Phase.AGENT: Side.HARNESS,
    Phase.HANDOVER: Side.ENVIRONMENT,
    Phase.VERIFY: Side.VERIFIER,
}


def side_of(error: BaseException, phase: Phase) -> Side:
    """Return whose failure it is."""
    if not isinstance(error, ColdframeError):
        return _OTHERWISE[phase]
    if error.side in _PLATFORM or isinstance(error, GradingPreventedError):
        return error.side
    if isinstance(error, RunError | NotAuthenticatedError | NotPermittedError):
        return Side.CALLER
    if error.side is Side.CALLER and phase in _BEFORE_THE_AGENT:
        return Side.CALLER
    if error.side in {Side.VERIFIER, Side.HARNESS}:
        return error.side
    return _OTHERWISE[phase]


def failure_of(
    error: Exception, phase: Phase, redactor: Redactor, evidence: dict[str, Any]
) -> Failure:
    """Return the failure that an exception ends an attempt with, with its evidence.

    Args:
        evidence: what else is known; `sandbox_reason` says why the sandbox is gone.
    """
    side, message = side_of(error, phase), plain_text(str(error)) or type(error).__name__
    retryable = isinstance(error, ColdframeError) and error.retryable
    code = error.code if isinstance(error, ColdframeError) else f"{side}_crashed"
    facts = {"exception": type(error).__name__, **evidence}
    if not isinstance(error, ColdframeError):
        facts["traceback"] = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    cause = str(evidence.get("sandbox_reason") or "")
    if isinstance(error, SandboxGoneError) and phase is Phase.AGENT and "oom" in cause.split():
        # The agent's commands used up the sandbox's own memory limit: its own doing. There is
        # nothing left to verify, so there is no reward either.
        side, code = Side.POLICY, "sandbox_out_of_memory"
    if isinstance(error, SandboxGoneError) and cause == SPAWNER_LOST:
        retryable = True
    return Failure(
        side=side,
        code=code,
        message=redactor.text(message)[:MAX_TEXT],
        retryable=retryable,
        execution=error.execution.value if isinstance(error, ColdframeError) else None,
        phase=phase.value,
        evidence=redactor.json(facts),
    )


def may_retry(failure: Failure) -> bool:
    """Whether a new attempt of the same sample may follow: the platform's passing faults only.

    A full disk is not among them once the agent has acted: it may be what filled it, and a new
    attempt would be a second chance that only those get who break things. Nor is a later step
    that cannot begin.
    """
    if failure.phase == Phase.STEP_SETUP and failure.side is Side.STARTUP:
        return False
    if failure.code == StorageFullError.code and failure.phase not in _BEFORE_THE_AGENT:
        return False
    return failure.retryable and failure.side in {Side.STARTUP, Side.ENVIRONMENT}
