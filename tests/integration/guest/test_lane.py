"""The pure cgroup v2 lane as one test of the host's run; what runs inside is tests/guest."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from coldframe.images.base import Image
from tests.guest.__main__ import TESTS
from tests.guest.errors import GuestError
from tests.guest.machine import GuestSettings, run_guest

pytestmark = pytest.mark.root


@pytest.fixture
def small(busybox_image: Image) -> GuestSettings:
    """A guest with nothing but a shell, on the machine's own store."""
    return GuestSettings.from_environment(images=(busybox_image.name,), repository=False)


@pytest.mark.timeout(900)
def test_guest_with_pure_cgroup_v2_passes_its_own_tests(
    debian_image: Image, busybox_image: Image, empty_image: Image, musl_image: Image
) -> None:
    """Users have pure v2 and older kernels than ours: what is green here only may fail there."""
    images = tuple(image.name for image in (debian_image, busybox_image, empty_image, musl_image))
    settings = GuestSettings.from_environment(images=images, deadline_s=600)

    result = run_guest(TESTS, settings)

    said = result.output.decode("utf-8", "replace")
    assert result.exit_code == 0, said
    summary = re.search(
        r"^=+ (\d+) passed(?:, \d+ deselected)?(.*) in [\d.:() s]+=+$", said, re.MULTILINE
    )
    assert summary is not None, said
    assert summary[2] == "", f"only passed tests count here:\n{said}"


def test_guest_command_gives_its_output_and_exit_code(small: GuestSettings) -> None:
    """If either were lost on the way, failing tests in the guest would count as passed."""
    result = run_guest(["sh", "-c", "cat /proc/self/cgroup; echo oops >&2; exit 7"], small)

    assert result.exit_code == 7
    assert result.output == b"0::/system.slice/coldframe-guest.service\noops\n"


def test_guest_past_its_deadline_is_killed_with_nothing_left(small: GuestSettings) -> None:
    """A guest that hangs must not hold a CPU and 2 GiB of the machine that tests it."""
    with pytest.raises(GuestError, match="killed after 6 s"):
        run_guest(["sleep", "600"], replace(small, deadline_s=6))

    assert list(small.cache.glob("scratch-*")) == []
    assert _children_named("qemu") == []


def _children_named(prefix: str) -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, children) if _name(pid).startswith(prefix)]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()
