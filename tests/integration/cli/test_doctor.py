"""`coldframe doctor`: what is said of a machine, and the exit code that scripts look at."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import coldframe
from coldframe.cli import doctor
from coldframe.host.doctor import Check
from coldframe.images.base import Image
from coldframe.protocol.models import Capabilities

pytestmark = pytest.mark.root
DOCTOR = [sys.executable, "-m", "coldframe.cli.main", "doctor"]


def _checks(home: Path | None = None, *before: str) -> tuple[int, dict[str, dict[str, Any]]]:
    environment = dict(os.environ)
    if home is not None:
        environment["COLDFRAME_HOME"] = str(home)
    ended = subprocess.run(
        [*before, *DOCTOR, "--json"], env=environment, capture_output=True, check=False, timeout=60
    )
    said = json.loads(ended.stdout)
    assert (ended.returncode == 0) is said["able"]
    return ended.returncode, {check["name"]: check for check in said["checks"]}


def test_doctor_on_an_able_machine_makes_a_sandbox(debian_image: Image) -> None:
    """That every part is there does not show that they work together."""
    code, checks = _checks()

    assert code == 0
    assert checks["sandbox"]["ok"]
    assert "limits: cpu" in checks["sandbox"]["detail"]
    assert checks["images"]["ok"]
    assert checks["storage"]["detail"].startswith("uppers on ")


def test_doctor_says_why_uppers_are_not_where_they_would_be_best() -> None:
    """Without btrfs there are no disk limits, and nobody would know why."""
    able = Capabilities(
        runtime="native",
        isolation=True,
        storage="directory",
        details={"storage_fallback": "mkfs.btrfs is missing: `apt-get install btrfs-progs`"},
    )

    check = doctor.storage_check(able)

    assert (check.name, check.ok, check.required) == ("storage", False, False)
    assert "uppers on directory" in check.detail
    assert "apt-get install btrfs-progs" in check.detail


def test_doctor_on_a_small_disk_says_so_beside_the_rest(tmp_path: Path) -> None:
    """It ended with one line that named the pool, and said nothing of anything else."""
    small = f'mount -t tmpfs -o size=30m none {tmp_path} && exec "$@"'
    code, checks = _checks(tmp_path, "unshare", "-m", "sh", "-c", small, "sh")

    assert code == 1
    assert "COLDFRAME_HOME" in checks["disk space"]["remedy"]
    assert "is nearly full" in checks["btrfs pool"]["detail"]
    assert "make room" in checks["btrfs pool"]["remedy"]


def test_doctor_without_images_says_how_to_get_one(tmp_path: Path) -> None:
    """On a new machine this is the first thing that is missing, and nothing to fail for."""
    code, checks = _checks(tmp_path / "home")

    assert code == 0
    assert "sandbox" not in checks
    assert checks["images"] == {
        "name": "images",
        "ok": False,
        "detail": "0 in the store, but not debian:bookworm, busybox:latest",
        "remedy": "coldframe image bootstrap debian:bookworm; "
        "coldframe image bootstrap busybox:latest",
        "required": False,
    }


def test_doctor_without_root_comes_to_its_end_and_names_root(tmp_path: Path) -> None:
    """That is when it is needed most; it named other file systems and kernels, or nothing.

    What that user cannot reach was missing, and to be built again.
    """
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(
        Path(coldframe.__file__).parent,
        closed / "coldframe",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    script = (
        "import os, sys\n"
        "from coldframe.cli.main import main\n"
        "main(['doctor', '--json'])\n"  # loads what that user cannot read
        "print('--- without rights ---', flush=True)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(closed), "COLDFRAME_HOME": str(closed / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert ended.returncode == 1
    said = json.loads(ended.stdout.partition("--- without rights ---")[2])
    failed = {check["name"]: check for check in said["checks"] if not check["ok"]}
    assert {"root", "capabilities", "cgroups", "mount api"} <= set(failed)
    for name in ("native program", "home", "disk space", "images"):
        assert str(closed) in failed[name]["detail"]
        assert "user 65534 may not enter" in failed[name]["detail"]
    assert "sudo coldframe doctor" in failed["root"]["remedy"]
    assert "COLDFRAME_URL" in failed["root"]["remedy"]  # what works without
    assert all("root" in check["remedy"] for check in failed.values()), failed
    assert ended.stderr == ""


def test_doctor_as_root_is_not_told_to_become_root(tmp_path: Path) -> None:
    """A kernel or a container that refuses root needs another remedy."""
    (tmp_path / "images").write_text("no directory")

    code, checks = _checks(tmp_path)

    assert code == 0
    assert checks["images"]["remedy"] == f"look at {tmp_path / 'images'}"


def test_doctor_gives_a_remedy_for_whatever_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that only says no sends its reader to a search engine."""
    monkeypatch.setenv("COLDFRAME_HOME", str(tmp_path))
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda home: (
            Check("overlay", False, "overlay is not known", "modprobe overlay"),
            Check("mmdebstrap", False, "is missing", "apt-get install it", required=False),
        ),
    )

    assert doctor.doctor() == 1

    said = capsys.readouterr().out
    assert "MISSING  overlay" in said
    assert "wanted   mmdebstrap" in said
    assert "fix: modprobe overlay" in said
    assert "fix: apt-get install it" in said
