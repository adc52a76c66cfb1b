"""Say what failed in Harbor's terms; `harbor_trials.endings` finds our code again.

Harbor books an exception by the name of its class, and decides by that name whether a trial is
tried again. So what is a verdict's own failure is raised as Harbor's class, never tried again; all
else keeps the class that it has here.
"""

from __future__ import annotations

from harbor.environments.base import HealthcheckError
from harbor.verifier.verifier import (
    RewardFileEmptyError,
    RewardFileNotFoundError,
    VerifierOutputParseError,
)

from coldframe.protocol.errors import ColdframeError, RewardInvalidError, RewardMissingError
from coldframe.rollouts.healthcheck import UnhealthyError


def as_harbors(error: ColdframeError) -> Exception:
    """Return the exception to raise into Harbor; its message names our code."""
    kinds: dict[type[ColdframeError], type[Exception]] = {
        RewardMissingError: RewardFileNotFoundError,
        UnhealthyError: HealthcheckError,
    }
    empty = isinstance(error, RewardInvalidError) and str(error).endswith(": empty")
    harbors = RewardFileEmptyError if empty else kinds.get(type(error), VerifierOutputParseError)
    return harbors(f"{error} [coldframe {error.code}]")
