"""A run's directory that somebody else made: an export refuses by name, and never hangs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldframe.cli.main import main
from coldframe.trajectories import store
from tests.unit.integrations.test_harbor_trials import atif, result, write

BAD, GOOD = "demo-one.0.0", "demo-one.1.0"


class Run:
    """An imported run of two attempts, of which the first is spoilt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "attempts" / BAD / "trajectory.json"

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        value = json.loads(self.file.read_text())
        change(value)
        self.file.write_text(json.dumps(value))

    def replace(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new, 1))

    def action(self, content: bytes) -> None:
        """Give the first step another action, whose digest is right."""
        digest = hashlib.sha256(content).hexdigest()
        place = self.root / "blobs" / digest[:2] / digest
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)

        def change(value: dict[str, Any]) -> None:
            value["steps"][0]["action"] = {"sha256": digest, "bytes": len(content)}

        self.edit(change)

    def blob(self) -> Path:
        digest = json.loads(self.file.read_text())["steps"][0]["action"]["sha256"]
        return self.root / "blobs" / digest[:2] / digest

    def put(self, path: Path, make: Callable[[Path], object]) -> None:
        path.unlink(missing_ok=True)
        make(path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(store.MAX_FILE_BYTES + 1)


def started(value: float) -> Callable[[dict[str, Any]], None]:
    return lambda one: one["steps"][0].update(started_at=value)


HOSTILE: dict[str, tuple[Callable[[Run], None], str]] = {
    "fifo": (lambda run: run.put(run.file, fifo), "no regular file"),
    "link to a device": (lambda run: run.put(run.file, device), "no regular file"),
    "dangling link": (
        lambda run: run.put(run.file, lambda path: path.symlink_to("/nowhere/x")),
        "No such file",
    ),
    "link to another's file": (
        lambda run: run.put(run.file, lambda path: path.symlink_to("/etc/passwd")),
        "is not JSON",
    ),
    "directory": (lambda run: run.put(run.file, Path.mkdir), "irectory"),
    "huge": (lambda run: run.put(run.file, sparse), "bytes"),
    "key twice": (
        lambda run: run.replace('"schema_version"', '"rewards": {"reward": 1.0}, "schema_version"'),
        "the key 'rewards' more than once",
    ),
    "nan": (lambda run: run.edit(started(float("nan"))), "NaN"),
    "number beyond any": (lambda run: run.replace('"index": 0', '"index": 1e999'), "1e999"),
    "no time": (lambda run: run.edit(started(1e300)), "steps.0.started_at"),
    "deep": (lambda run: run.file.write_text("[" * 100_000), "is not JSON"),
    "deep settings": (
        lambda run: run.replace(
            '"settings": {', '"settings": {"a": ' + "[" * 200 + "]" * 200 + ","
        ),
        "levels deep",
    ),
    "blob is a fifo": (lambda run: run.put(run.blob(), fifo), "blob"),
    "blob is a link to a device": (lambda run: run.put(run.blob(), device), "blob"),
    "blob is huge": (lambda run: run.put(run.blob(), sparse), "bytes"),
    "blob was changed": (lambda run: run.put(run.blob(), Path.touch), "not what its name says"),
    "action is no JSON": (lambda run: run.action(b"{"), "steps.0.action: is not JSON"),
    "action is no object": (lambda run: run.action(b"[]"), "steps.0.action: is no JSON object"),
    "action with a key twice": (
        lambda run: run.action(b'{"message": "a", "message": "b"}'),
        "the key 'message' more than once",
    ),
    "action is deep": (lambda run: run.action(b"[" * 100_000), "is not JSON"),
    "action holds nan": (lambda run: run.action(b'{"message": "a", "n": NaN}'), "NaN"),
    "journal is a fifo": (
        lambda run: fifo(run.file.with_name("calls.jsonl")),
        "no journal of calls",
    ),
    "journal is none": (
        lambda run: run.file.with_name("calls.jsonl").write_text("[1]\n"),
        "no line of a journal",
    ),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    write(tmp_path / "job", result("one__1"), atif("a"))
    write(tmp_path / "job", result("two__2"), atif("b"))
    assert main(["import", "harbor", str(tmp_path / "job"), "--out", str(tmp_path / "run")]) == 0
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 1 << 20)
    return Run(tmp_path / "run")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("spoil", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_attempt_is_refused_by_name_and_the_other_written(
    spoil: Callable[[Run], None],
    named: str,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One bad attempt of a downloaded run must neither hang, crash nor hide the others."""
    spoil(run)
    capsys.readouterr()

    out = tmp_path / "atif"
    assert main(["export", "atif", str(run.root), "--out", str(out), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)

    (refused,) = told["refused"]
    assert refused["attempt"] == BAD
    assert named in refused["problem"]
    assert [Path(one).name for one in told["written"]] == [f"{GOOD}.json"]


def test_export_never_writes_through_a_link(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory that it writes to may be somebody's, too."""
    out, precious = tmp_path / "atif", tmp_path / "precious"
    out.mkdir()
    precious.write_text("kept")
    (out / f"{BAD}.json").symlink_to(precious)

    assert main(["export", "atif", str(run.root), "--out", str(out)]) == 0
    capsys.readouterr()
    assert precious.read_text() == "kept"
    assert json.loads((out / f"{BAD}.json").read_text())["trajectory_id"] == BAD
