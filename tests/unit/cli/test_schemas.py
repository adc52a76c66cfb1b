"""`task check` holds every verdict that it saw to the schema beside the tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.cli.schemas import schema_problems
from coldframe.rollouts.check import NOP, ORACLE, Checked, Contender, Trial
from coldframe.rollouts.load import load_task
from coldframe.rollouts.scaffold import write_new_task
from coldframe.trajectories.store import BlobStore
from tests.unit.trajectories import samples

SCHEMA = """
schema = "coldframe.rewards/1"
name = "mine"
version = 3
scalarise = "gated_mean@1"
[[part]]
key = "reward"
meaning = "it works"
direction = "higher"
range = [0, 1]
unit = "share"
weight = 1
[code]
{code}
"""
FIXTURES = """
[[fixture]]
case = "right"
task = "sum"
solution = "oracle"
scalar = 1
[[fixture]]
case = "wrong"
task = "sum"
solution = "nop"
scalar = 0
[[fixture]]
case = "empty"
content = ""
refused = "empty"
[[fixture]]
case = "huge"
content = "1e300"
refused = "range"
[[fixture]]
case = "nan"
content = "NaN"
refused = "finite"
[[fixture]]
case = "missing_key"
content = "{}"
refused = "map of 0"
[[fixture]]
case = "verifier_error"
error = "verifier_deadline"
refused = "no verdict"
[[fixture]]
case = "steering"
content = '"1"'
refused = "not a number"
"""


def _checked(directory: Path, oracle: float | None = 1.0, nop: float | None = 0.0) -> Checked:
    write_new_task(directory / "sum", name=None, image="debian:bookworm", multi_step=False)
    task = load_task(directory / "sum")
    blobs = BlobStore(directory / "blobs")
    trials = tuple(
        Trial(
            Contender(name, name, name == ORACLE),
            samples.trajectory(blobs, task="sum", reward=reward),
            None,
        )
        for name, reward in ((ORACLE, oracle), (NOP, nop))
    )
    return Checked(task, trials, ())


def _write(checked: Checked, fixtures: str = FIXTURES, digest: str | None = None) -> None:
    code = f'sum = "{digest or checked.task.tests_digest}"' if digest != "" else ""
    file = checked.task.directory.parent / "rewards.toml"
    file.write_text(SCHEMA.format(code=code) + fixtures)


def test_set_whose_schema_holds_has_no_problem(tmp_path: Path) -> None:
    """The control; and a set without a schema has none either."""
    checked = _checked(tmp_path)
    assert schema_problems([checked]) == []
    _write(checked)

    assert schema_problems([checked]) == []


@pytest.mark.parametrize(
    ("oracle", "nop", "words"),
    [
        (2.0, 0.0, ["sum: oracle", "out of its range, 0 to 1 share"]),
        (1.0, 0.5, ["fixture 1 (wrong)", "0.5, not scalar 0.0"]),
        (None, 0.0, ["fixture 0 (right)", "no verdict"]),
    ],
)
def test_verdict_that_is_not_what_the_schema_says_is_told(
    tmp_path: Path, oracle: float | None, nop: float, words: list[str]
) -> None:
    """Seen in a real run, and not only among the fixtures."""
    checked = _checked(tmp_path, oracle, nop)
    _write(checked)

    said = "\n".join(schema_problems([checked]))
    assert all(one in said for one in words), said


@pytest.mark.parametrize(
    ("digest", "words"), [("", "add [code] sum ="), ("0" * 64, "raise version")]
)
def test_tests_that_the_schema_does_not_know_are_told(
    tmp_path: Path, digest: str, words: str
) -> None:
    """A verdict by other tests is another verdict."""
    checked = _checked(tmp_path)
    _write(checked, digest=digest)

    (said,) = schema_problems([checked])
    assert words in said
    assert checked.task.tests_digest in said


def test_schema_that_cannot_be_read_or_lacks_a_case_is_told(tmp_path: Path) -> None:
    """Named by its file."""
    checked = _checked(tmp_path)
    _write(checked, fixtures="")
    assert len(schema_problems([checked])) == 8

    (tmp_path / "rewards.toml").write_text("version = 1\n")
    (said,) = schema_problems([checked])
    assert said.startswith(str(tmp_path / "rewards.toml"))
