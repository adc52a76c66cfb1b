"""What the environment says is read once and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.node.settings import DEFAULT_HOME, NodeSettings
from coldframe.protocol.errors import InvalidRequestError


def test_settings_of_empty_environment_are_the_defaults() -> None:
    """Defaults stand in one place."""
    assert NodeSettings.from_environment({}) == NodeSettings()
    assert NodeSettings().home == DEFAULT_HOME


def test_settings_read_every_variable() -> None:
    """A variable that is documented and not read is a dead setting."""
    environment = {
        "COLDFRAME_HOME": "/h",
        "COLDFRAME_RUNTIME": "fake",
        "COLDFRAME_STORAGE": "tmpfs",
        "COLDFRAME_WORKERS": "3",
        "COLDFRAME_MAX_SANDBOXES": "5",
        "COLDFRAME_CREATE_SLOTS": "6",
        "COLDFRAME_EXEC_SLOTS": "7",
        "COLDFRAME_EXEC_HOLD_S": "0.5",
        "COLDFRAME_MAX_RUNNING_EXECS": "8",
        "COLDFRAME_QUEUE_LIMIT": "9",
        "COLDFRAME_RESULT_TTL_S": "1.5",
        "COLDFRAME_RESULT_COUNT": "10",
        "COLDFRAME_RESULT_BYTES": "11",
        "COLDFRAME_SPOOL_COUNT": "12",
        "COLDFRAME_SPOOL_BYTES": "13",
        "COLDFRAME_SANDBOX_SPOOL_BYTES": "14",
        "COLDFRAME_EXPIRED_IDS": "15",
        "COLDFRAME_QUARANTINE_S": "0",
        "COLDFRAME_RETURN_S": "2.5",
        "COLDFRAME_ENDED_COUNT": "16",
        "COLDFRAME_OWNER_WINDOW_BYTES": "17",
    }

    settings = NodeSettings.from_environment(environment)

    known = (
        Path("/h"),
        "fake",
        "tmpfs",
        3,
        5,
        6,
        7,
        0.5,
        8,
        9,
        1.5,
        10,
        11,
        12,
        13,
        14,
        15,
        0.0,
        16,
    )
    assert settings == NodeSettings(*known, owner_window_bytes=17, return_s=2.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLDFRAME_WORKERS", "0"),
        ("COLDFRAME_WORKERS", "two"),
        ("COLDFRAME_QUEUE_LIMIT", "-1"),
        ("COLDFRAME_RESULT_TTL_S", "nan"),
        ("COLDFRAME_EXEC_HOLD_S", "0"),
        ("COLDFRAME_EXEC_HOLD_S", "soon"),
        ("COLDFRAME_QUARANTINE_S", "-1"),
    ],
)
def test_settings_with_bad_value_name_the_variable(name: str, value: str) -> None:
    """One clear sentence that names the thing."""
    with pytest.raises(InvalidRequestError, match=f"{name}='{value}'"):
        NodeSettings.from_environment({name: value})


def test_home_that_is_relative_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that changes its directory found no images any more, and left its node behind."""
    monkeypatch.chdir(tmp_path)
    given = NodeSettings.from_environment({"COLDFRAME_HOME": "state/home"})
    monkeypatch.chdir("/")

    assert given.home == tmp_path / "state" / "home"
