"""What a guest is put together from, of one architecture."""

from __future__ import annotations

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.guest.kernel import BUSYBOX, Kernel, fetch_kernel


@dataclass(frozen=True)
class Architecture:
    """How QEMU makes a machine of it, and what is compiled for it."""

    name: str
    """As `uname -m` says."""
    qemu: str
    package: str
    """That has `qemu`."""
    machine: str
    cpu: str
    """Emulated: without what only costs there, a fifth of the time."""
    cmdline: str
    """What its kernel is told."""
    compiler: str


X86_64 = Architecture(
    "x86_64",
    "qemu-system-x86_64",
    "qemu-system-x86",
    "q35",
    "Nehalem",
    # Emulated on a busy machine, ticks come late: the check finds none, and the start then hangs.
    "console=ttyS0 no_timer_check",
    "cc",
)
AARCH64 = Architecture(
    "aarch64",
    "qemu-system-aarch64",
    "qemu-system-arm",
    "virt",
    "cortex-a72",
    "console=ttyAMA0",
    "aarch64-linux-gnu-gcc",
)


@dataclass(frozen=True)
class Parts:
    """Files of one architecture."""

    architecture: Architecture
    kernel: Kernel
    images: Path
    """Root of an image store."""
    busybox: Path
    packages: Path
    """Python's, for the Python of the first image."""
    program: Path | None = None
    """The native program; None: the repository's own."""

    @property
    def is_foreign(self) -> bool:
        """Whether this machine's processor cannot run them."""
        return self.architecture.name != platform.machine()


def own_parts(home: Path, cache: Path) -> Parts:
    """Return this machine's own store and packages, and a kernel for them.

    Raises:
        GuestError: the kernel cannot be fetched.
    """
    packages = Path(sysconfig.get_path("purelib"))
    return Parts(X86_64, fetch_kernel(cache), home / "images", BUSYBOX, packages)
