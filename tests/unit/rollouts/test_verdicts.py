"""What a verdict's messages quote of a sandbox: escaped, and no more than can be read."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from coldframe import AsyncSandboxClient
from coldframe.protocol.errors import ColdframeError, GradingPreventedError
from coldframe.protocol.models import ExecResult, GuardRefusal, GuardReport
from coldframe.rollouts.integrity import Tampering
from coldframe.rollouts.verdicts import (
    RewardUnvouchedError,
    TamperedError,
    from_files,
    from_report,
    tell_refused,
)

HOSTILE = "/work/\x1b[2J\n\udcff" + "a" * 4000


def test_hostile_names_in_a_refusal_are_escaped_and_bounded() -> None:
    """A message goes to terminals and into reports: no name may clear a screen or fill a page."""
    refused = GuardRefusal(
        at=0.0, program="\x1b]0;\n", name="reward.txt", outsider=False, cause=HOSTILE
    )
    report = GuardReport(
        files=(),
        displaced=(),
        refused=(refused,),
        touched=HOSTILE,
        alone=True,
        lost=False,
        cpu_s=0.0,
        forks_refused=0,
    )
    tampering = Tampering(None)
    tell_refused(report, tampering)
    with pytest.raises(ColdframeError) as raised:
        # How the command ended is told only where nobody was refused.
        from_report(report, cast("ExecResult", None), tampering, lambda _: None, workdir="/work")
    said = [str(raised.value), *(event.after for event in tampering.events)]

    assert len(said) == 2
    for text in said:
        assert text.isprintable()
        assert len(text) < 600
        assert "/work/" in text


def _refused_for(cause: str, *displaced: str) -> GuardReport:
    refused = GuardRefusal(
        at=0.0, program="/bin/bash", name="reward.txt", outsider=False, cause=cause
    )
    return GuardReport(
        files=(),
        displaced=displaced,
        refused=(refused,),
        touched=cause,
        alone=True,
        lost=False,
        cpu_s=0.0,
        forks_refused=0,
    )


@pytest.mark.parametrize(
    ("report", "error"),
    [
        (_refused_for("/usr/bin/python3"), GradingPreventedError),
        (_refused_for("/usr/src/app/solution.py"), RewardUnvouchedError),
        (_refused_for("/usr/src/app/solution.py", "reward.txt"), GradingPreventedError),
    ],
    ids=["in the place of a program", "the agent's work", "taken away"],
)
def test_who_is_to_blame_for_a_missing_verdict_depends_on_what_was_done(
    report: GuardReport, error: type[ColdframeError]
) -> None:
    """Work below /usr is run because test.sh runs it; a system's program is not the agent's."""
    with pytest.raises(error):
        from_report(
            report,
            cast("ExecResult", None),
            Tampering(None),
            lambda _: None,
            workdir="/usr/src/app",
        )


async def test_reward_that_was_written_after_the_end_is_somebody_elses(
    async_client: AsyncSandboxClient,
) -> None:
    """Where nothing can be guarded the time is all that tells."""
    async with await async_client.create_sandbox("any") as sandbox:
        tampering = Tampering(None)
        await sandbox.files.write("/logs/verifier/reward.txt", b"1\n")
        ended = await sandbox.exec("true")
        assert await from_files(sandbox, ended, tampering, lambda _: None) == (
            "/logs/verifier/reward.txt",
            b"1\n",
        )

        await asyncio.sleep(0.02)  # what may be late by the clocks is a millisecond
        await sandbox.files.write("/logs/verifier/reward.txt", b"9\n")
        with pytest.raises(TamperedError, match="after test"):
            await from_files(sandbox, ended, tampering, lambda _: None)
        assert [event.what for event in tampering.events] == ["reward_late"]
