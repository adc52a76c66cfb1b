"""Variables of the environment that are misspelt."""

from __future__ import annotations

import re
from pathlib import Path

import coldframe
from coldframe.cli.variables import KNOWN, misspelt


def test_known_variables_are_those_that_the_sources_name() -> None:
    """A variable that is read and not listed would be called misspelt."""
    root = Path(coldframe.__file__).parent
    files = [one for one in root.rglob("*.py") if one.name != "variables.py"]
    named = {
        name for one in files for name in re.findall(r"COLDFRAME_[A-Z_]*[A-Z]", one.read_text())
    }

    assert named - {"COLDFRAME_NATIVE"} == KNOWN


def test_misspelt_variable_is_told_with_the_nearest_and_a_stranger_is_not() -> None:
    """A limit that is misspelt is silently not there."""
    told = misspelt(["COLDFRAME_MAX_SANDBOX", "COLDFRAME_HOME", "COLDFRAME_MY_OWN_THING", "PATH"])

    assert told == [
        "warning: nothing reads COLDFRAME_MAX_SANDBOX; did you mean COLDFRAME_MAX_SANDBOXES?"
    ]
