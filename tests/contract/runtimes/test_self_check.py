"""Every runtime keeps every promise of the seam."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.protocol.models import Capabilities, ExecRequest, SandboxSpec
from coldframe.runtimes.fake import FakeImages, FakeRuntime, FakeSandbox, die
from coldframe.runtimes.native import NativeRuntime
from coldframe.runtimes.native_sandbox import kill_init
from coldframe.runtimes.self_check import CHECKS, Check, run_check, run_self_check
from coldframe.runtimes.self_check_lab import Checks, Lab, expect

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


@pytest.fixture
async def fake_runtime() -> AsyncIterator[FakeRuntime]:
    """A started fake runtime."""
    runtime = FakeRuntime()
    await runtime.start()
    yield runtime
    await runtime.close()


@every_check
async def test_fake_runtime_keeps_promise(fake_runtime: FakeRuntime, check: Check) -> None:
    """Tests of the rooms above stand on the fake: it must behave like the real one."""
    outcome = await run_check(check, fake_runtime, FakeImages().resolve("any"), end_sandbox=die)

    if outcome.status == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail


@pytest.mark.root
@every_check
async def test_native_runtime_keeps_promise(
    native_runtime: NativeRuntime, debian_image: Image, check: Check
) -> None:
    """On glibc, with every wall on."""
    outcome = await run_check(check, native_runtime, debian_image, end_sandbox=kill_init)

    if outcome.status == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail


@pytest.mark.root
async def test_native_runtime_keeps_every_promise_on_busybox(
    native_runtime: NativeRuntime, busybox_image: Image
) -> None:
    """No bash, no glibc, no python: nothing of ours may depend on the image."""
    report = await run_self_check(native_runtime, busybox_image, end_sandbox=kill_init)

    assert report.ok, str(report)
    assert {outcome.name for outcome in report.skipped} <= NOT_ON_NATIVE


NOT_ON_NATIVE = {
    "unenforceable_disk_limit_is_refused",
    "policy_that_cannot_be_enforced_is_refused",
    "directory_that_cannot_be_guarded_is_refused",
}
"""It enforces them."""


def test_self_check_skips_of_fake_are_by_stated_capability_only() -> None:
    """A check that is skipped for another reason would hide a broken promise."""
    stated = {"pty", "ports", "end_sandbox"}

    skipped = {check.name for check in CHECKS if check.needs - stated}

    assert skipped == {
        "users_of_the_image_are_honoured",
        "pid_one_cannot_be_killed_from_inside",
        "processes_of_others_are_not_seen",
        "memory_limit_is_enforced",
        "process_limit_is_enforced",
        "owners_are_the_sandboxes_own",
        "pseudo_file_systems_are_refused",
        "disk_limit_is_enforced",
        "connection_that_no_rule_names_is_refused_and_noted",
        "metadata_is_refused_whatever_is_public",
        "policy_can_be_set_changed_and_taken_away",
        "events_are_followed_by_a_cursor",
        "guarded_directory_is_written_by_its_command_alone",
        "code_that_was_there_before_may_not_write_the_named_files",
    }


async def test_self_check_of_broken_runtime_names_what_is_broken() -> None:
    """A suite that passes everything is worth nothing."""

    class LosesExitCodes(FakeSandbox):
        async def start_exec(self, request: ExecRequest, operation_id: str):  # type: ignore[no-untyped-def]
            return await super().start_exec(
                request.model_copy(update={"command": "true", "argv": None}), operation_id
            )

    class BrokenRuntime(FakeRuntime):
        sandbox_class = LosesExitCodes

    runtime = BrokenRuntime()
    await runtime.start()
    only = {"exit_code_and_streams_are_apart", "ranges_are_exact"}

    report = await run_self_check(runtime, FakeImages().resolve("any"), only=only)

    await runtime.close()
    assert [outcome.name for outcome in report.failed] == ["exit_code_and_streams_are_apart"]
    assert not report.ok
    assert "1 passed, 1 failed, 0 skipped" in str(report)


async def test_self_check_of_runtime_that_leaves_strays_fails(fake_runtime: FakeRuntime) -> None:
    """A check passes only when nothing of its sandboxes is left."""
    checks = Checks()

    @checks()
    async def leaves_one(lab: Lab) -> None:
        lab.made.append("sb-aaaaaa-0000000001")
        spec = SandboxSpec(image="any")
        await lab.runtime.create("sb-aaaaaa-0000000001", spec, lab.image)
        expect(True, "")

    outcome = await run_check(checks.table[0], fake_runtime, FakeImages().resolve("any"))

    assert outcome.status == "failed"
    assert outcome.detail.startswith("left behind: directory ")


async def test_self_check_without_capability_says_which(fake_runtime: FakeRuntime) -> None:
    """The reader of a report must see what was not checked, and why."""
    check = next(check for check in CHECKS if check.name == "memory_limit_is_enforced")

    outcome = await run_check(check, fake_runtime, FakeImages().resolve("any"))

    assert (outcome.status, outcome.detail) == (
        "skipped",
        "the runtime states no isolation, memory",
    )


async def test_fake_capabilities_promise_no_wall(fake_runtime: FakeRuntime) -> None:
    """Nobody may take the fake for isolation."""
    capabilities: Capabilities = fake_runtime.capabilities()

    assert not capabilities.isolation
    assert capabilities.limits == frozenset()
    assert not capabilities.users


def test_self_check_of_an_image_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    """A traceback says so too, but not to everybody."""
    words = ("coldframe.runtimes.self_check", "native", "busybox", "--home", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "self_check: no image 'busybox:latest' in the store; make it with" in done.stderr
    assert "Traceback" not in done.stderr
