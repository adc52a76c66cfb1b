"""The contract of the runtime seam, as checks that anybody can run on their own runtime.

`run_self_check(runtime, image)` needs no test framework. From a shell:
`python -m coldframe.runtimes.self_check fake`, or `native IMAGE`.

The image needs /bin/sh and the usual small tools (busybox has them all). A check whose
capability the runtime does not state is skipped, and the report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coldframe.images.base import Image
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.ids import new_node_id
from coldframe.protocol.models import Capabilities
from coldframe.runtimes import (
    self_check_changes,
    self_check_control,
    self_check_exec,
    self_check_files,
    self_check_guards,
    self_check_life,
    self_check_network,
)
from coldframe.runtimes.base import Runtime
from coldframe.runtimes.self_check_lab import (
    Check,
    CheckFailedError,
    EndSandbox,
    Lab,
    NotApplicableError,
)

__all__ = ["CHECKS", "Check", "Outcome", "Report", "run_check", "run_self_check"]

CHECKS: tuple[Check, ...] = (
    *self_check_exec.check.table,
    *self_check_control.check.table,
    *self_check_files.check.table,
    *self_check_changes.check.table,
    *self_check_life.check.table,
    *self_check_network.check.table,
    *self_check_guards.check.table,
)
"""Every promise, in the order in which they are checked."""

_LIMIT_S = 60.0
"""How long one check may take before it counts as hanging."""


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    """Why it failed or was skipped; empty when it passed."""
    seconds: float


@dataclass(frozen=True)
class Report:
    """What became of all checks of one runtime."""

    runtime: str
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether none failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Those that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")

    @property
    def skipped(self) -> tuple[Outcome, ...]:
        """Those that do not apply."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "skipped")

    @property
    def summary(self) -> str:
        """Numbers in one line."""
        passed = len(self.outcomes) - len(self.failed) - len(self.skipped)
        return (
            f"runtime {self.runtime}: {passed} passed, {len(self.failed)} failed, "
            f"{len(self.skipped)} skipped"
        )

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [f"  {o.status}: {o.name}: {o.detail}" for o in self.outcomes if o.detail]
        return "\n".join(lines)


def missing(check: Check, capabilities: Capabilities, *, can_end: bool) -> list[str]:
    """What a check needs that the runtime does not state."""
    stated = {
        name
        for name in ("isolation", "pty", "ports", "users", "egress", "guards")
        if getattr(capabilities, name)
    }
    stated |= capabilities.limits
    if can_end:
        stated.add("end_sandbox")
    return sorted(check.needs - stated)


async def run_check(
    check: Check, runtime: Runtime, image: Image, *, end_sandbox: EndSandbox | None = None
) -> Outcome:
    """Run one check on a started runtime. Raises nothing that the runtime does wrong."""
    lacking = missing(check, runtime.capabilities(), can_end=end_sandbox is not None)
    if lacking:
        return Outcome(check.name, "skipped", f"the runtime states no {', '.join(lacking)}", 0.0)
    lab = Lab(runtime, image, end_sandbox)
    began = time.monotonic()

    def outcome(status: Literal["passed", "failed", "skipped"], detail: str = "") -> Outcome:
        return Outcome(check.name, status, detail, time.monotonic() - began)

    try:
        async with asyncio.timeout(_LIMIT_S):
            await check.run(lab)
            left = [s for s in await runtime.leaks([]) if any(made in s for made in lab.made)]
    except CheckFailedError as failure:
        return outcome("failed", str(failure))
    except NotApplicableError as reason:
        return outcome("skipped", str(reason))
    except TimeoutError:
        return outcome("failed", f"it hung for {_LIMIT_S:g} s")
    except Exception as error:  # noqa: BLE001 (whatever a runtime raises is its failure)
        return outcome("failed", f"{type(error).__name__}: {error}")
    return outcome("failed", f"left behind: {', '.join(left)}") if left else outcome("passed")


async def run_self_check(
    runtime: Runtime,
    image: Image,
    *,
    end_sandbox: EndSandbox | None = None,
    only: Collection[str] | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run every check, one after the other, on a started runtime.

    Args:
        end_sandbox: ends a sandbox from outside (kills its pid 1); without it that check is
            skipped.
        only: names of the checks to run; None: all.
        progress: is told each outcome.
    """
    outcomes = []
    for check in CHECKS:
        if only is None or check.name in only:
            outcome = await run_check(check, runtime, image, end_sandbox=end_sandbox)
            outcomes.append(outcome)
            if progress is not None:
                progress(outcome)
    return Report(runtime.name, tuple(outcomes))


def _print_outcome(outcome: Outcome) -> None:
    detail = f": {outcome.detail}" if outcome.detail else ""
    sys.stdout.write(f"{outcome.status} {outcome.name} ({outcome.seconds:.2f} s){detail}\n")


def _parts(name: str, image: str, home: Path) -> tuple[Runtime, Image, EndSandbox]:
    """A runtime of ours, an image for it, and what ends one of its sandboxes from outside."""
    if name == "fake":
        from coldframe.runtimes import fake

        return fake.FakeRuntime(), fake.FakeImages().resolve(image), fake.die
    from coldframe.images.store import ImageStore
    from coldframe.runtimes.native import NativeRuntime
    from coldframe.runtimes.native_sandbox import kill_init

    store = ImageStore(home / "images")
    node_id = new_node_id()
    runtime = NativeRuntime(node_id, store.layers_directory, home / "nodes" / node_id)
    return runtime, store.resolve(image), kill_init


async def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m coldframe.runtimes.self_check")
    parser.add_argument("runtime", choices=["fake", "native"])
    parser.add_argument("image", nargs="?", default="busybox", help="of the store in HOME")
    parser.add_argument("--home", type=Path, default=Path("/var/lib/coldframe"))
    chosen = parser.parse_args(arguments)
    try:
        runtime, image, end = _parts(chosen.runtime, chosen.image, chosen.home)
        await runtime.start()
    except ColdframeError as error:
        parser.exit(2, f"self_check: {error}\n")
    try:
        report = await run_self_check(runtime, image, end_sandbox=end, progress=_print_outcome)
    finally:
        await runtime.close()
    sys.stdout.write(f"{report.summary}\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1:])))
