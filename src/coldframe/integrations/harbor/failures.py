"""Say what failed in Harbor's terms, and find our code again in what Harbor has written down.

Harbor books an exception by the name of its class, and decides by that name whether a trial is
tried again. So what is a verdict's own failure is raised as Harbor's class, never tried again; all
else keeps the class that it has here.
"""

from __future__ import annotations

import re

from harbor.environments.base import HealthcheckError
from harbor.verifier.verifier import (
    RewardFileEmptyError,
    RewardFileNotFoundError,
    VerifierOutputParseError,
)

from coldframe.protocol.errors import ColdframeError, RewardInvalidError, RewardMissingError
from coldframe.rollouts.healthcheck import UnhealthyError

_SAID = re.compile(r"\[coldframe ([a-z_]+)\]")


def as_harbors(error: ColdframeError) -> Exception:
    """Return the exception to raise into Harbor; its message names our code."""
    kinds: dict[type[ColdframeError], type[Exception]] = {
        RewardMissingError: RewardFileNotFoundError,
        UnhealthyError: HealthcheckError,
    }
    empty = isinstance(error, RewardInvalidError) and str(error).endswith(": empty")
    harbors = RewardFileEmptyError if empty else kinds.get(type(error), VerifierOutputParseError)
    return harbors(f"{error} [coldframe {error.code}]")


def code_of(exception_type: str, message: str) -> str | None:
    """Return the code of a failure that Harbor has written down; None: it is not one of ours.

    Args:
        exception_type: `exception_info.exception_type` of a trial or step.
        message: `exception_info.exception_message`.
    """
    said = _SAID.findall(message)
    if said:
        return str(said[-1])
    timed_out = {
        "VerifierTimeoutError": "verifier_deadline",
        "EnvironmentStartTimeoutError": "boot_deadline",
    }
    return timed_out.get(exception_type) or _CODES().get(exception_type)


def _CODES() -> dict[str, str]:
    found, waiting = {}, [ColdframeError]
    while waiting:
        one = waiting.pop()
        found[one.__name__] = one.code
        waiting += one.__subclasses__()
    return found
