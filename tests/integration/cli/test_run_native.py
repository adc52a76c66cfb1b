"""`coldframe run` in a real sandbox, in a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe.cli import machine as looking

pytestmark = pytest.mark.root
COLDFRAME = [sys.executable, "-m", "coldframe.cli.main"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a busybox image in it."""
    home = tmp_path_factory.mktemp("home")
    ended = _coldframe(home, "image", "bootstrap", "busybox")
    assert ended.returncode == 0, ended.stderr
    return home


@pytest.fixture(autouse=True)
def _nothing_is_left(home: Path) -> Iterator[None]:
    yield
    _coldframe(home, "gc")
    assert looking.survey(home).ledger().balanced


def _coldframe(home: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COLDFRAME, *arguments],
        env={**os.environ, "COLDFRAME_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_run_uses_the_image_and_its_own_namespaces(home: Path) -> None:
    """The command sees the image's files and pids of its own."""
    ended = _coldframe(home, "run", "busybox", "--", "sh", "-c", "ls /bin/busybox; id -u; exit 4")

    assert (ended.returncode, ended.stdout) == (4, b"/bin/busybox\n0\n")


def test_run_past_its_memory_says_so(home: Path) -> None:
    """137 alone is a riddle."""
    ended = _coldframe(
        home, "run", "--memory", "32M", "busybox", "--", "dd", "if=/dev/zero", "of=/x", "bs=256M"
    )

    assert ended.returncode == 137
    assert ended.stderr.endswith(b"coldframe: the command ran out of memory (--memory)\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no-such-image", "--", "true"], 125, b"no-such-image"),
        (["busybox", "--user", "ghost", "--", "true"], 125, b"ghost"),
        (["busybox", "--workdir", "/no/where", "--", "true"], 125, b"/no/where"),
        (["busybox", "--", "no-such-program"], 127, b"no-such-program"),
    ],
)
def test_run_that_cannot_start_names_what_is_missing(
    home: Path, arguments: list[str], code: int, said: bytes
) -> None:
    """One sentence, nothing was run, nothing is left."""
    ended = _coldframe(home, "run", *arguments)

    assert (ended.returncode, ended.stdout) == (code, b"")
    assert said in ended.stderr
    assert ended.stderr.count(b"\n") == 1


def test_run_killed_outright_is_accounted_for(home: Path) -> None:
    """SIGKILL runs no clean-up: the sandbox ends all the same, and is booked as lost."""
    before = looking.survey(home).ledger()
    process = subprocess.Popen(
        [*COLDFRAME, "run", "busybox", "--", "sh", "-c", "echo up; sleep 600"],
        env={**os.environ, "COLDFRAME_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"up\n"
        assert looking.survey(home).ledger().live == 1
        process.kill()

    assert _coldframe(home, "gc").returncode == 0
    after = json.loads(_coldframe(home, "ledger", "--json").stdout)

    assert (after["live"], after["leaked"], after["balanced"]) == (0, 0, True)
    assert (after["created"], after["lost"]) == (before.created + 1, before.lost + 1)
