"""`coldframe image`, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run the command on a store of its own."""
    if os.geteuid() != 0:
        pytest.skip("images belong to root")

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "coldframe.cli.main", "image", *map(str, words)],
            env={**os.environ, "COLDFRAME_HOME": str(tmp_path / "home")},
            check=False,
            capture_output=True,
            text=True,
        )

    return call


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A directory that can be imported."""
    path = tmp_path / "rootfs"
    path.mkdir()
    (path / "file").write_text("content")
    return path


def test_import_ls_inspect_rm_tell_one_story(call: Call, rootfs: Path) -> None:
    """Scripts read the JSON; stdout holds nothing else."""
    made = json.loads(call("import", "team/x:1", rootfs, "--json").stdout)
    listed = json.loads(call("ls", "--json").stdout)
    shown = json.loads(call("inspect", made["digest"], "--json").stdout)
    removed = json.loads(call("rm", "team/x:1", "--json").stdout)

    assert listed == [made]
    assert shown.pop("layer_paths")[0].endswith(f"/{made['layers'][0]}/root")
    assert shown == made
    assert made["config"]["env"]["PATH"].startswith("/usr/local/sbin:")
    assert removed[0]["names"] == ["team/x:1"]
    assert removed[0]["layers"] == made["layers"]
    assert call("ls", "--json").stdout == "[]\n"


def test_people_get_tables_and_sentences(call: Call, rootfs: Path) -> None:
    """Progress goes to stderr, results to stdout."""
    done = call("import", "x", rootfs)
    assert done.stdout.startswith("x:latest  ")
    assert "taking digests" in done.stderr
    assert call("ls").stdout.splitlines()[1].split()[0] == "x:latest"
    assert "layer " in call("inspect", "x").stdout
    assert call("rm", "x").stdout == "removed x:latest; 1 layer with 0.0 MiB freed\n"
    assert "image bootstrap debian:bookworm" in call("ls").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "none"], "no image 'none:latest' in the store; make it with"),
        (["rm", "x", "none"], "no image 'none:latest'"),
        (["import", "Bad Name", "."], "'Bad Name' is not an image name"),
        (["import", "x", "/nothing"], "/nothing: No such file"),
        (["bootstrap", "alpine"], "'alpine' cannot be bootstrapped"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    call: Call, rootfs: Path, words: list[str], said: str
) -> None:
    """Nothing is lost by a mistake: `rm x none` removes neither."""
    call("import", "x", rootfs)

    done = call(*words)

    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert len(json.loads(call("ls", "--json").stdout)) == 1


def test_bad_dockerfile_line_is_named_before_anything_starts(call: Call, tmp_path: Path) -> None:
    """File and line, where an editor can jump to."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\n\nEXPOSE http\n")

    done = call("build", "-t", "x", tmp_path)

    assert done.returncode == 2
    assert f"{tmp_path}/Dockerfile:3: 'http' is no port" in done.stderr
