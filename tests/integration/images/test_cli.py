"""`coldframe image`, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.root
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run the command on a store of its own."""

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
        (["rm", "x", "none"], "no image 'none:latest' in the store; see: coldframe image ls"),
        (["rm", "x", "debian:12"], "'debian:12' is no image but an alias of 'debian:bookworm'"),
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


def test_what_was_begun_and_failed_ends_with_1_and_not_as_a_mistake(
    call: Call, rootfs: Path, tmp_path: Path
) -> None:
    """A script must tell `make` that failed from a word that it misspelt itself."""
    (tmp_path / "Dockerfile").write_text("FROM busybox\nRUN echo first; echo why >&2; exit 2\n")
    call("bootstrap", "busybox")
    failed = call("build", "-t", "x", "--network", "none", tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "Dockerfile").write_text("FROM bare\nRUN true\n")
    call("import", "bare", rootfs)
    not_started = call("build", "-t", "x", "--network", "none", bare)
    (tmp_path / "home" / "images" / "refs" / "y:latest.json").write_text("{")
    damaged = call("inspect", "y")

    assert (failed.returncode, not_started.returncode, damaged.returncode) == (1, 1, 1)
    line = f"{tmp_path}/Dockerfile:2: `RUN echo first; echo why >&2; exit 2` "
    assert failed.stderr.endswith(f"{line}failed with exit code 2:\n  first\n  why\n")
    assert f"{bare}/Dockerfile:2: `RUN true` was not started: " in not_started.stderr
    assert "y:latest.json is damaged" in damaged.stderr


DOCKERFILE = (
    "ARG BASE=base\nFROM $BASE AS one\nARG WHO=nobody\nRUN echo $WHO > /who\n"
    'HEALTHCHECK --interval=1s CMD test -e /who\nENTRYPOINT ["cat", "/who"]\nLABEL a=b\n'
    "FROM one\nRUN false\n"
)


def test_build_with_alias_argument_and_target_shows_what_it_made(
    call: Call, tmp_path: Path
) -> None:
    """A public Dockerfile, made to build here by two commands, and what tasks read of it."""
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(DOCKERFILE)
    call("bootstrap", "busybox")
    asked = ("build", "-t", "x", "--build-arg", "WHO=me", "--network", "none", context)

    missing = call(*asked)
    aliased = call("alias", "base", "busybox")
    built = call(*asked, "--target", "one")
    failed = call(*asked)

    assert missing.returncode == 2
    assert "Dockerfile:2: no image 'base:latest' in the store" in missing.stderr
    assert aliased.stdout == "base:latest stands for busybox:latest\n"
    assert built.returncode == 0, built.stderr
    assert "FROM $BASE AS one: busybox:latest stands for it" in built.stderr
    assert "Dockerfile:9: `RUN false` failed with exit code 1 and printed nothing" in failed.stderr
    assert failed.returncode == 1
    shown = json.loads(call("inspect", "x", "--json").stdout)
    config = shown["config"]
    assert config["entrypoint"] == ["cat", "/who"]
    assert config["healthcheck"]["argv"] == ["/bin/sh", "-c", "test -e /who"]
    assert config["healthcheck"]["interval_s"] == 1.0
    assert config["labels"] == {"a": "b"}
    assert shown["history"][0]["resolved"].startswith("busybox:latest@sha256:")
    assert json.loads(call("inspect", "base", "--json").stdout)["name"] == "busybox:latest"
    for line in ('entrypoint ["cat", "/who"]', "label    a=b", "history  ARG WHO=nobody"):
        assert line in call("inspect", "x").stdout


def test_alias_lists_what_was_added_and_what_is_built_in(call: Call) -> None:
    """And forgets only what was added."""
    call("alias", "python:3.11-slim", "team/python:1")

    listed = call("alias", "ls").stdout
    table = json.loads(call("alias", "ls", "--json").stdout)

    assert ["python:3.11-slim", "team/python:1"] in [line.split() for line in listed.splitlines()]
    assert "built in" in listed
    assert table["debian:12-slim"] == "debian:bookworm"
    refused = call("rm", "python:3.11-slim").stderr
    assert refused.endswith("forget it with: coldframe image alias rm python:3.11-slim\n")
    assert call("alias", "rm", "python:3.11-slim").stdout == "removed python:3.11-slim\n"
    assert "is no alias" in call("alias", "rm", "debian:12-slim").stderr
    assert call("alias", "one").returncode == 2
