"""What a verdict's messages quote of a sandbox: escaped, and no more than can be read."""

from __future__ import annotations

from typing import cast

import pytest

from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import ExecResult, GuardRefusal, GuardReport
from coldframe.rollouts.integrity import Tampering
from coldframe.rollouts.verdicts import from_report, tell_refused

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
