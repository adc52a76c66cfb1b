"""A result that cannot be read back is none, and a run must find that out before it says done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from coldframe.protocol.errors import Side
from coldframe.trajectories.schema import (
    SCHEMA_VERSION,
    Failure,
    Termination,
    Times,
    Trajectory,
)
from coldframe.trajectories.store import (
    TRAJECTORY_FILE,
    BlobStore,
    StoreError,
    TrajectoryInvalidError,
    read_trajectory,
    write_json,
    write_trajectory,
)
from tests.unit.trajectories.samples import trajectory


def test_blob_of_the_same_bytes_is_stored_once(tmp_path: Path) -> None:
    """A thousand attempts show the same prompt."""
    blobs = BlobStore(tmp_path)

    first, second = blobs.put(b"same"), blobs.put(b"same")

    assert first == second
    assert blobs.get(first) == b"same"
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


def test_blob_that_was_changed_or_lost_is_refused_by_path(tmp_path: Path) -> None:
    """Training on what somebody edited must not go unnoticed."""
    blobs = BlobStore(tmp_path)
    ref = blobs.put(b"true")
    path = blobs.path(ref.sha256)
    path.write_bytes(b"fake")
    with pytest.raises(StoreError, match=ref.sha256):
        blobs.get(ref)
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        blobs.get(ref)


def test_blob_that_was_cut_by_loss_of_power_is_written_anew(tmp_path: Path) -> None:
    """The name survives, the content does not; putting it again must repair it."""
    blobs = BlobStore(tmp_path)
    ref = blobs.put(b"whole")
    blobs.path(ref.sha256).write_bytes(b"")

    assert blobs.get(blobs.put(b"whole")) == b"whole"


def test_trajectory_reads_back_equal(tmp_path: Path) -> None:
    """The control of every refusal below."""
    blobs = BlobStore(tmp_path / "blobs")
    written = trajectory(blobs)

    write_trajectory(tmp_path / "a", written, blobs)

    assert read_trajectory(tmp_path / "a" / TRAJECTORY_FILE, blobs, verify_blobs=True) == written


@pytest.mark.parametrize("damage", ["cut", "schema", "extra", "blob"])
def test_trajectory_that_is_damaged_is_refused_by_path(tmp_path: Path, damage: str) -> None:
    """A cut file, another schema, an unknown field or a lost blob is not a result."""
    blobs = BlobStore(tmp_path / "blobs")
    written = trajectory(blobs)
    write_trajectory(tmp_path / "a", written, blobs)
    path = tmp_path / "a" / TRAJECTORY_FILE
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    elif damage == "schema":
        path.write_text(text.replace(SCHEMA_VERSION, "coldframe.trajectory/1"))
    elif damage == "extra":
        path.write_text(text.replace('"clock"', '"glock": 1, "clock"'))
    else:
        next(one for one in (tmp_path / "blobs").rglob("*") if one.is_file()).unlink()

    with pytest.raises(TrajectoryInvalidError, match=str(path)):
        read_trajectory(path, blobs)


@pytest.mark.parametrize(
    ("rewards", "failed"), [(None, False), ({"reward": 1.0}, True), ({}, False)]
)
def test_trajectory_ends_in_a_verdict_or_a_failure_never_both(
    tmp_path: Path, rewards: dict[str, float] | None, failed: bool
) -> None:
    """An attempt with neither or both would be counted as whatever a reader prefers."""
    failure = Failure(side=Side.STARTUP, code="x", message="x", phase="create")
    values = trajectory(BlobStore(tmp_path)).model_dump()
    values |= {"rewards": rewards, "failure": failure if failed else None}

    with pytest.raises(ValueError, match=r"exactly one|at least one"):
        Trajectory.model_validate(values)


def test_trajectory_with_an_infinite_reward_is_refused(tmp_path: Path) -> None:
    """One infinity makes every mean over the batch useless."""
    values = trajectory(BlobStore(tmp_path)).model_dump()

    with pytest.raises(ValueError, match="not finite"):
        Trajectory.model_validate(values | {"rewards": {"reward": float("inf")}})


def test_write_json_holds_paths_that_are_not_utf_8(tmp_path: Path) -> None:
    """A task's directory may be called anything; it must not end the batch."""
    path = tmp_path / "file.json"
    write_json(path, {"task\udcff": "/t\udcff/ü"})

    assert json.loads(path.read_bytes()) == {"task\udcff": "/t\udcff/ü"}


def test_write_json_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    """A crash in the middle of writing must not cost the summary that was there."""
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})

    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]


def test_termination_names_every_limit() -> None:
    """A limit that ends as `finished` would look like a policy that gave up."""
    assert {"agent_deadline", "step_limit", "token_limit", "parse_failures"} <= set(Termination)


@pytest.mark.parametrize("field", ["started_at", "identity.verifier.digest", "times.model_s"])
def test_what_is_not_known_says_why(tmp_path: Path, field: str) -> None:
    """None alone could be a mistake of whoever wrote it; with a reason it is a statement."""
    document = trajectory(BlobStore(tmp_path)).model_dump(mode="json")
    place = document
    *path, name = field.split(".")
    for one in path:
        place = place[one]
    place[name] = None

    with pytest.raises(ValidationError, match=f"{field} is not known"):
        Trajectory.model_validate(document)
    document["unknown"][field] = "whoever made it did not keep it"
    assert Trajectory.model_validate(document).unknown[field]


def test_sum_over_something_unknown_is_unknown() -> None:
    """As 0 it would be a number too small."""
    assert Times(create_s=1.0, model_s=None).run_s is None
    assert Times(create_s=1.0, model_s=0.5).run_s == 1.5
