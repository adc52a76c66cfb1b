"""What docs/node.md says is what the code does."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

from coldframe.node.settings import NodeSettings

PAGE = Path(__file__).parents[3] / "docs" / "node.md"


def _number(value: str) -> str:
    """What a default comes to on this machine."""
    times, _, what = value.partition("×")
    return str(int(times) * len(os.sched_getaffinity(0))) if what == "processors" else value


def test_documented_settings_are_the_settings_with_their_defaults() -> None:
    """A table of defaults that drifts is worse than none."""
    rows = dict(re.findall(r"^\| COLDFRAME_(\w+) \| (\S+) \|", PAGE.read_text(), re.MULTILINE))

    assert rows.keys() == {field.name.upper() for field in fields(NodeSettings)}
    environment = {f"COLDFRAME_{name}": _number(value) for name, value in rows.items()}
    assert NodeSettings.from_environment(environment) == NodeSettings()
