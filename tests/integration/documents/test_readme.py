"""What the README tells a newcomer to type works, in a home of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.images.store import ImageStore

pytestmark = pytest.mark.root

README = Path(__file__).parents[3] / "README.md"
SERVICE = "node.example"
"""Stands in the README for a service of the reader's."""


def sections() -> dict[str, str]:
    """The README by its headings."""
    parts = re.split(r"^## (.*)\n", README.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(section: str, language: str) -> list[str]:
    """The fenced blocks of a section."""
    return re.findall(rf"^```{language}\n(.*?)^```", sections()[section], re.DOTALL | re.M)


@pytest.fixture
def newcomer(tmp_path: Path, image_store: ImageStore, debian_image: Image) -> dict[str, str]:
    """The environment of somebody who has the base images and nothing else."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "images").symlink_to(image_store.layers_directory.parent)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "COLDFRAME_HOME": str(home), "PATH": path}


def run(words: list[str], newcomer: dict[str, str], where: Path) -> str:
    """What a program prints that succeeds."""
    done = subprocess.run(
        words, env=newcomer, cwd=where, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quick_start_runs(newcomer: dict[str, str], tmp_path: Path) -> None:
    """The first ten lines that anybody tries; they start the machine's node."""
    (program,) = blocks("Quick start", "python")
    try:
        assert run([sys.executable, "-c", program], newcomer, tmp_path) == "Hello\n\n"
    finally:
        run(["coldframe", "node", "stop"], newcomer, tmp_path)


def test_quick_start_without_the_image_ends_in_the_remedy(
    newcomer: dict[str, str], tmp_path: Path
) -> None:
    """A newcomer's first error must say what to type."""
    (program,) = blocks("Quick start", "python")
    bare = {**newcomer, "COLDFRAME_HOME": str(tmp_path / "bare"), "COLDFRAME_URL": "in-process"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=bare, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "ImageNotFoundError" in last
    assert "coldframe image bootstrap debian:bookworm" in last


def test_shell_of_the_quick_start_runs(newcomer: dict[str, str], tmp_path: Path) -> None:
    """From a command in a sandbox to a run that can be looked at."""
    first, *_ = blocks("Quick start", "sh")
    lines = first.splitlines()
    assert [line.split()[1] for line in lines] == ["run", "task", "task", "rollout", "rollout"]
    said = [run(["sh", "-c", line], newcomer, tmp_path) for line in lines]
    assert said[0] == "42\n"
    assert "2 passes in 2 verdicts" in said[3]
    assert "my-task.0.0" in said[4]


def test_each_way_to_a_node_makes_a_client(newcomer: dict[str, str], tmp_path: Path) -> None:
    """What is written once must be the same program on all three."""
    (program,) = blocks("One node, many clients", "python")
    made = "from coldframe import SandboxClient\n" + program
    assert SERVICE in made
    assert run([sys.executable, "-c", made], newcomer, tmp_path) == ""
