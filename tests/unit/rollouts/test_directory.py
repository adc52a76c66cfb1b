"""A run directory outlives its process, and must never mix two runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coldframe.protocol.errors import RunError
from coldframe.rollouts.directory import LOCK_SCHEMA, AttemptKey, RunDirectory, differences
from tests.unit.trajectories.samples import trajectory

ASKED = {"samples": 2, "model": {"name": "a"}}
LOCK = {"schema_version": LOCK_SCHEMA, "tasks": {"one": {"digest": "a"}}, "images": {}}


def test_begin_again_with_the_same_configuration_returns_the_first_id(tmp_path: Path) -> None:
    """The control: a resumed run is the same run."""
    directory = RunDirectory(tmp_path)

    assert directory.begin("run-1", ASKED) == "run-1"
    assert directory.begin("run-2", ASKED) == "run-1"


def test_begin_again_with_another_configuration_names_what_changed(tmp_path: Path) -> None:
    """Half a run with one model and half with another is no run."""
    directory = RunDirectory(tmp_path)
    directory.begin("run-1", ASKED)

    with pytest.raises(RunError, match=r'samples: 2 is now 3.*|model\.name: "a" is now "b"'):
        directory.begin("run-2", {"samples": 3, "model": {"name": "b"}})


def test_lock_of_a_changed_task_is_refused_and_images_are_kept(tmp_path: Path) -> None:
    """A task edited between two halves of a run would be measured twice, differently."""
    directory = RunDirectory(tmp_path)
    directory.lock(LOCK)
    directory.write_lock({**LOCK, "images": {"one": {"digest": "sha256:1"}}})

    assert directory.lock(LOCK)["images"] == {"one": {"digest": "sha256:1"}}
    with pytest.raises(RunError, match=r"tasks\.one\.digest"):
        directory.lock({**LOCK, "tasks": {"one": {"digest": "b"}}})


def test_held_directory_refuses_a_second_holder(tmp_path: Path) -> None:
    """Two processes on one run would make every attempt twice."""
    with (
        RunDirectory(tmp_path).held(),
        pytest.raises(RunError, match="another process"),
        RunDirectory(tmp_path).held(),
    ):
        pass
    with RunDirectory(tmp_path).held():
        assert (tmp_path / "attempts").is_dir()


def test_held_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    """A mistyped --out must not fill somebody's home directory."""
    (tmp_path / "thesis.txt").write_text("")

    with pytest.raises(RunError, match=r"thesis\.txt"), RunDirectory(tmp_path).held():
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.txt"]


def test_results_are_those_that_read_back(tmp_path: Path) -> None:
    """What a killed process left half-written is not a result."""
    directory = RunDirectory(tmp_path)
    kept, cut = AttemptKey("one", 0, 0), AttemptKey("one", 1, 0)
    for key in (kept, cut):
        directory.save(key, trajectory(directory.blobs, sample=key.sample))
    path = directory.attempts / str(cut) / "trajectory.json"
    path.write_bytes(path.read_bytes()[:100])
    (directory.attempts / "one.2.0").mkdir()

    assert list(directory.results()) == [kept]
    directory.clear(cut)
    assert not (directory.attempts / str(cut)).exists()


def test_results_of_no_run_are_an_error(tmp_path: Path) -> None:
    """A loop over a mistyped run would train on nothing, and say nothing."""
    with pytest.raises(RunError, match="none-such: not a run"):
        RunDirectory(tmp_path / "none-such").results()


def test_sweep_removes_only_temporary_files(tmp_path: Path) -> None:
    """A process killed while it wrote leaves its temporary file for ever otherwise."""
    directory = RunDirectory(tmp_path)
    directory.save(AttemptKey("one", 0, 0), trajectory(directory.blobs))
    leftover = tmp_path / "blobs" / ".x.123.tmp"
    leftover.write_bytes(b"")

    directory.sweep()

    assert not leftover.exists()
    assert len(directory.results()) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema_version": "other"}'])
def test_read_of_a_file_that_is_none_of_ours_names_it(tmp_path: Path, content: bytes) -> None:
    """`rollout show` on any directory must say one clear sentence."""
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(RunError, match=r"config\.json"):
        RunDirectory(tmp_path).read("config.json", "coldframe.run/1")


def test_differences_tell_true_from_one() -> None:
    """JSON keeps them apart, Python's equality does not."""
    assert differences({"a": 1, "b": 2}, json.loads('{"a": true, "c": 2}')) == [
        "a: 1 is now true",
        "b: 2 is now null",
        "c: null is now 2",
    ]


def test_result_is_on_disk_with_the_tokens_and_blobs_that_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power a result without its journal could never be trained on, nor made again:
    what has a result is not."""
    directory, key = RunDirectory(tmp_path), AttemptKey("one", 0, 0)
    made = trajectory(directory.blobs)
    directory.calls(key).parent.mkdir(parents=True)
    directory.calls(key).write_text("{}\n")
    synced: list[Path] = []

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", sync)
    directory.save(key, made)

    blobs = {path for path in directory.blobs.root.rglob("*") if path.is_file()}
    held = {above for path in blobs for above in path.relative_to(tmp_path).parents}
    assert blobs
    assert {*blobs, directory.calls(key), directory.attempts / str(key)} <= {*synced}
    assert {directory.attempts} | {tmp_path / one for one in held} - {tmp_path} <= {*synced}
    results = [one for one in synced if one.name.startswith(".trajectory")]
    assert synced.index(directory.calls(key)) < synced.index(results[0])
