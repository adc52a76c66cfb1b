"""Under what conditions test.sh ran, and whose doing it is if there is no verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coldframe.protocol.errors import (
    ColdframeError,
    GradingPreventedError,
    VerifierDeadlineError,
    VerifierError,
)
from coldframe.protocol.models import ExecResult, GuardReport, ProcessInfo, Reason, SandboxSpec
from coldframe.protocol.text import excerpt
from coldframe.rollouts.verdicts import TamperedError

HOG = 0.25
"""The part of the sandbox's processor time from which others hold test.sh up."""
KILLED = 128
"""A script's exit code is more than this if a signal has ended what it ran."""


@dataclass
class Conditions:
    """Of one run of test.sh."""

    not_the_agents: str | None
    """The operation that ran in the sandbox before the agent came."""
    ended: ExecResult | None = None
    """How test.sh ended; None: it was not run."""
    report: GuardReport | None = None
    disturbed: bool = False
    """Something that the agent left lived beside it."""
    starved: bool = False
    """Memory, processes or time ran out while something else lived."""

    @property
    def lacked_memory(self) -> bool:
        """Whether some of test.sh was killed for want of memory."""
        return self.ended is not None and bool(self.ended.resources.oom_kills)

    def note_beside(self, living: Iterable[ProcessInfo]) -> None:
        """These lived beside it."""
        own = self.not_the_agents
        self.disturbed |= any(own is None or one.operation_id != own for one in living)

    def note_end(self, ended: ExecResult, left: Iterable[ProcessInfo], spec: SandboxSpec) -> None:
        """It has ended, and these live on; the report of its guard is there."""
        others = [one for one in left if one.operation_id != ended.operation_id]
        self.note_beside(others)
        self.starved = bool(left) and self._lacked(ended, len(others), spec)

    def _lacked(self, ended: ExecResult, others: int, spec: SandboxSpec) -> bool:
        used = ended.resources
        if used.oom_kills or others > spec.pids // 2:
            return True
        if self.report is None:
            return False
        if self.report.forks_refused or self.report.lost:
            return True
        theirs = self.report.cpu_s - (used.cpu_user_s or 0.0) - (used.cpu_system_s or 0.0)
        lasted = ended.ended_at - ended.started_at
        return ended.reason is Reason.DEADLINE and theirs > HOG * spec.cpu * lasted

    def others_may_have_caused(self, error: VerifierError) -> bool:
        """Whether it can be for what the agent left running that there is no verdict."""
        if self.starved:
            return True
        if not self.disturbed:
            return False
        if isinstance(error, VerifierDeadlineError | TamperedError):
            return True
        ended = self.ended
        return ended is not None and (ended.signal is not None or (ended.exit_code or 0) > KILLED)

    def attributed(self, error: VerifierError) -> ColdframeError:
        """Say whose it is: what the tests were at work on has held them up, or changed them."""
        touched = None if self.report is None else self.report.touched
        if touched is None or not isinstance(error, VerifierDeadlineError | TamperedError):
            return error
        return GradingPreventedError(
            f"{error}; it was at work on {excerpt(touched)}, which the agent has made"
        )
