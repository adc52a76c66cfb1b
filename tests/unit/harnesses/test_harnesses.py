"""Harnesses are found by name; a limit that is nonsense is refused before anything runs."""

from __future__ import annotations

import pytest

from coldframe.harnesses import Harness, Limits, harness_names, load_harness
from coldframe.harnesses.base import ModelSettings, check_platform
from coldframe.harnesses.skills import front_matter
from coldframe.protocol.errors import InvalidRequestError, SandboxGoneError, SpawnerLostError
from coldframe.protocol.models import Reason
from tests.unit.trajectories.samples import exec_result


@pytest.mark.parametrize("name", harness_names())
def test_load_harness_of_every_name_gives_one_that_follows_the_seam(name: str) -> None:
    """The table names dotted paths; a typo in one would be found by a user."""
    harness = load_harness(name)

    assert isinstance(harness, Harness)
    assert harness.name == name
    assert harness.version


def test_load_harness_by_dotted_path_gives_a_third_partys() -> None:
    """Nobody should have to install a package to try a harness."""
    assert load_harness("coldframe.harnesses.nop:NopHarness").name == "nop"


@pytest.mark.parametrize("name", ["absent", "no.such.module:X", "coldframe.harnesses.nop:Absent"])
def test_load_harness_that_is_not_there_names_it(name: str) -> None:
    """The message names what was asked for."""
    with pytest.raises(InvalidRequestError, match=name.replace(".", r"\.")):
        load_harness(name)


@pytest.mark.parametrize(
    "limits", [{"steps": 0}, {"tokens": -1}, {"wall_s": float("nan")}, {"command_s": float("inf")}]
)
def test_limits_that_limit_nothing_are_refused_by_name(limits: dict[str, float]) -> None:
    """A limit of nan compares false with everything, and would never end an episode."""
    with pytest.raises(InvalidRequestError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


def test_model_settings_do_not_show_their_key() -> None:
    """A settings object is printed in tracebacks."""
    assert "sk-1" not in repr(ModelSettings("m", "http://127.0.0.1/v1", api_key="sk-1"))


@pytest.mark.parametrize(
    ("reason", "error"),
    [(Reason.SANDBOX_GONE, SandboxGoneError), (Reason.INFRASTRUCTURE, SpawnerLostError)],
)
def test_command_that_the_platform_ended_is_raised(reason: Reason, error: type[Exception]) -> None:
    """Shown to the policy as an observation it would be learnt from."""
    with pytest.raises(error):
        check_platform(exec_result(reason=reason, exit_code=None))
    check_platform(exec_result(reason=Reason.DEADLINE))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "---\nname: a\ndescription: 'b: c'\n---\nname: body",
            {"name": "a", "description": "b: c"},
        ),
        ('---\nname: "x"\n---', {"name": "x"}),
        (
            "---\ndescription: |\n  one\n\n  two\nname: a\n---",
            {"description": "one two", "name": "a"},
        ),
        ("---\nname: never closed", {}),
        ("name: a\n---\n", {}),
        ("", {}),
    ],
)
def test_front_matter_of_a_skill_is_read_as_it_is_written(
    text: str, fields: dict[str, str]
) -> None:
    """A description that is cut at its first line tells the model too little."""
    assert front_matter(text) == fields
