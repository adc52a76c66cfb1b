"""Run a command in the guest: `python -m tests.guest [COMMAND…]`, by default its own tests."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from tests.guest.errors import GuestError
from tests.guest.foreign import aarch64_parts
from tests.guest.machine import GuestSettings, run_guest

TESTS = (
    *("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "python3", "-m", "pytest"),
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "--color=no"),
    "tests/guest/test_guest.py",
    "tests/security/native",
    "tests/integration/native/test_lifecycle.py",
    "tests/integration/native/test_blanks.py",
    *("--deselect", "tests/integration/native/test_lifecycle.py::test_remove_tree"),
    *("--deselect", "tests/integration/native/test_lifecycle.py::test_sandbox_with_very_many"),
    *("--deselect", "tests/integration/native/test_blanks.py::test_blank_failing_at_a_step"),
)
"""What the lane runs: what is particular to the guest, and what a kernel could change.

Not what takes long and is the same whatever the cgroups are. Of a create, the lane fails each
step when it is done with the rest; on the host also each that is done ahead.
"""


def main() -> int:
    """Stream the command's output, and exit as it did; 125 when the guest itself failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.guest", description=__doc__)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds of wall clock")
    parser.add_argument("--console", action="store_true", help="show the kernel's log at the end")
    parser.add_argument("--image", action="append", default=[], help="one more image to take in")
    parser.add_argument("--aarch64", action="store_true", help="a machine of that architecture")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    settings = GuestSettings.from_environment()
    settings = dataclasses.replace(
        settings, deadline_s=options.deadline, images=(*settings.images, *options.image)
    )

    def show(piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    try:
        fetch = aarch64_parts if options.aarch64 else None
        result = run_guest(options.command or TESTS, settings, fetch, show)
    except GuestError as error:
        sys.stderr.write(f"{error}\n")
        return 125
    if options.console:
        sys.stderr.write(result.console.decode("utf-8", "replace"))
    sys.stderr.write(
        f"guest: Linux {result.kernel} on {result.accelerator}; put together in "
        f"{result.prepare_s:.1f} s, ran {result.run_s:.1f} s, exit code {result.exit_code}\n"
    )
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
