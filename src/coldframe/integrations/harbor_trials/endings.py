"""What a trial of Harbor's came to, in our words: rewards, or whose failure it was.

Harbor names an exception by its class. Where that does not say whose it is, the phase does that
had begun last, as it does for exceptions of our own.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from coldframe.integrations.harbor_trials.results import ExceptionInfo, Part, TrialResult
from coldframe.integrations.harbor_trials.reward_files import hold_to_files
from coldframe.learning.contracts import ContractError
from coldframe.learning.contracts.values import is_number
from coldframe.protocol.errors import (
    ColdframeError,
    Execution,
    HarnessError,
    InferenceError,
    RewardInvalidError,
    RewardMissingError,
    Side,
    VerifierDeadlineError,
    VerifierError,
)
from coldframe.protocol.wire import every_error
from coldframe.rollouts.attribution import MAX_TEXT, Phase
from coldframe.rollouts.boot import BootDeadlineError
from coldframe.rollouts.healthcheck import UnhealthyError
from coldframe.trajectories.recorder import plain_text
from coldframe.trajectories.schema import Failure, PolicyFailure, Termination

_SAID = re.compile(r"\[coldframe ([a-z_]+)\]")
_POLICY = {
    "AgentTimeoutError": Termination.AGENT_DEADLINE,
    "ContextLengthExceededError": Termination.CONTEXT_LIMIT,
    "ContextWindowExceededError": Termination.CONTEXT_LIMIT,
}
"""The policy's own doing: the verifier judges what it left."""
_INFERENCE = (
    *("RateLimitError", "ApiRateLimitError", "ApiUsageLimitError", "ApiOverloadedError"),
    *("InternalServerError", "ApiInternalServerError", "ServiceUnavailableError", "Timeout"),
    *("APIConnectionError", "ApiConnectionError", "ApiConnectionClosedError", "APIError"),
    *("ApiResponseStalledError", "ApiError", "AuthenticationError", "AgentAuthenticationError"),
    *("BadRequestError", "NotFoundError", "APIResponseValidationError"),
)
_NAMED: dict[str, tuple[Side, str, Phase]] = {
    "RewardFileNotFoundError": (Side.VERIFIER, RewardMissingError.code, Phase.VERIFY),
    "RewardFileEmptyError": (Side.VERIFIER, RewardMissingError.code, Phase.VERIFY),
    "VerifierOutputParseError": (Side.VERIFIER, RewardInvalidError.code, Phase.VERIFY),
    "VerifierTimeoutError": (Side.VERIFIER, VerifierDeadlineError.code, Phase.VERIFY),
    "AddTestsDirError": (Side.VERIFIER, VerifierError.code, Phase.VERIFY),
    "DownloadVerifierDirError": (Side.VERIFIER, VerifierError.code, Phase.VERIFY),
    "EnvironmentStartTimeoutError": (Side.STARTUP, BootDeadlineError.code, Phase.CREATE),
    "HealthcheckError": (Side.STARTUP, UnhealthyError.code, Phase.SETUP),
    "AgentSetupTimeoutError": (Side.HARNESS, HarnessError.code, Phase.SETUP),
    "NonZeroAgentExitCodeError": (Side.HARNESS, HarnessError.code, Phase.AGENT),
    **dict.fromkeys(_INFERENCE, (Side.INFERENCE, InferenceError.code, Phase.AGENT)),
}
_BY_PHASE = {
    Phase.CREATE: Side.STARTUP,
    Phase.SETUP: Side.HARNESS,
    Phase.AGENT: Side.HARNESS,
    Phase.VERIFY: Side.VERIFIER,
}


class Ending(NamedTuple):
    """Rewards, or a failure; and how the agent's time ended."""

    rewards: dict[str, float] | None
    failure: Failure | None
    termination: Termination
    policy_failure: PolicyFailure | None = None


def ending_of(trial: str, part: Part, files: dict[str, bytes]) -> Ending:
    """Return what a trial, or a step of one, came to.

    Args:
        files: what of the verifier's reward files is there, by name.
    """
    raised = part.exception_info
    policy = None if raised is None else _POLICY.get(raised.exception_type)
    if raised is not None and policy is None:
        return Ending(None, _raised(raised, part), Termination.FAILED)
    said = None
    if raised is not None and policy is not None:
        said = PolicyFailure(code=policy.value, message=_text(raised.exception_message))
    termination = policy or Termination.UNKNOWN
    try:
        rewards = _verdict(trial, part.rewards, files)
    except RewardMissingError as error:
        return Ending(None, _unverified(error), termination, said)
    except (ContractError, RewardInvalidError) as error:
        return Ending(None, _unverified(error, RewardInvalidError.code), termination, said)
    return Ending(rewards, None, termination, said)


def _verdict(trial: str, rewards: Any, files: dict[str, bytes]) -> dict[str, float]:
    """Return the rewards, held to the verifier's own file where that was kept.

    Raises:
        RewardMissingError: there are none. They are never 0.
        RewardInvalidError: one is no finite number.
        ContractError: the file says something else.
    """
    if not rewards:
        raise RewardMissingError(
            "the trial has no verdict: its verifier did not run, or gave none",
            execution=Execution.UNKNOWN,
        )
    for name, value in rewards.items():
        if not is_number(value):
            raise RewardInvalidError(f"rewards[{name!r:.80}] is {value!r:.80}, no finite number")
    hold_to_files(trial, rewards, files, "verifier")
    return {name: float(value) for name, value in rewards.items()}


def _raised(raised: ExceptionInfo, part: Part) -> Failure:
    name, phase = raised.exception_type, _last_begun(part)
    ours = _ours(raised)
    if ours is not None:
        side, code = ours.side, ours.code
    else:
        crashed = (_BY_PHASE[phase], f"{_BY_PHASE[phase]}_crashed", phase)
        side, code, phase = _NAMED.get(name, crashed)
    return Failure(
        side=side,
        code=code,
        message=_text(f"{name}: {raised.exception_message}".rstrip(": ")),
        phase=phase.value,
        evidence={
            "exception": _text(name),
            "traceback": _text(raised.exception_traceback[-MAX_TEXT:]),
            "side_by": "exception" if ours is not None or name in _NAMED else "phase",
            "rewards_not_taken": None if part.rewards is None else _text(str(part.rewards)),
        },
    )


def _ours(raised: ExceptionInfo) -> type[ColdframeError] | None:
    """Return the error of ours that our environment for Harbor has raised there."""
    said = _SAID.findall(raised.exception_message)
    for one in every_error():
        if one.code == said[-1] if said else one.__name__ == raised.exception_type:
            return one
    return None


def _unverified(error: Exception, code: str = RewardMissingError.code) -> Failure:
    message = _text(str(error))
    return Failure(side=Side.VERIFIER, code=code, message=message, phase=Phase.VERIFY.value)


def _last_begun(part: Part) -> Phase:
    begun = {Phase.VERIFY: part.verifier, Phase.AGENT: part.agent_execution}
    if isinstance(part, TrialResult):
        begun[Phase.SETUP] = part.agent_setup
    found = (phase for phase, one in begun.items() if one is not None and one.started_at)
    # A step has no other phases than the agent's and the verifier's.
    return next(found, Phase.CREATE if isinstance(part, TrialResult) else Phase.AGENT)


def _text(value: str) -> str:
    return plain_text(value)[:MAX_TEXT]
