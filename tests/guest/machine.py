"""Boot the guest, run one command in it, and leave nothing behind."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.guest.disk import make_disk
from tests.guest.errors import GuestError
from tests.guest.parts import Parts, own_parts

_PROBE_DEADLINE_S = 20.0
_CMDLINE = "quiet panic=-1 reboot=t mitigations=off"
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class GuestSettings:
    """Where the guest's parts are kept, and what it may use of this machine."""

    home: Path
    images: tuple[str, ...] = ("debian:bookworm",)
    """What the guest's image store holds; the first is its own user land too."""
    repository: bool = True
    """Whether it gets a copy of the repository and of its Python's packages: most of the disk."""
    memory_mib: int = 2048
    cpus: int = 1
    """Emulated, two of them spend a third more of our processor time on the same work."""
    deadline_s: float = 300.0
    """Wall clock from power-on; then the machine is killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the command's."""

    @classmethod
    def from_environment(cls, **changes: Any) -> GuestSettings:
        """Read COLDFRAME_HOME."""
        return cls(Path(os.environ.get("COLDFRAME_HOME", "/var/lib/coldframe")), **changes)

    @property
    def cache(self) -> Path:
        """Where kernels are kept and guests are put together."""
        return self.home / "guest"


@dataclass(frozen=True)
class GuestResult:
    """How the command ended, and what it and the kernel said."""

    exit_code: int
    output: bytes
    console: bytes
    accelerator: str
    kernel: str
    prepare_s: float
    run_s: float


def run_guest(
    command: Sequence[str],
    settings: GuestSettings,
    fetch: Callable[[Path], Parts] | None = None,
    on_output: Callable[[bytes], object] = lambda _: None,
) -> GuestResult:
    """Run a command on a fresh machine with pure cgroup v2, as root, in a copy of the repository.

    One guest runs at a time; others wait for it.

    Args:
        fetch: gives the guest's parts, which it may keep in a directory; by default our own.
        on_output: gets what the command writes, as it comes.

    Raises:
        GuestError: QEMU or a part is missing, or the machine ended, or was killed at the
            deadline, before the command did. The message holds the last words of both.
        ImageNotFoundError: the image is not in the store.
    """
    began = time.monotonic()
    with _workspace(settings.cache) as scratch:
        parts = fetch(settings.cache) if fetch else own_parts(settings.home, settings.cache)
        qemu = parts.architecture.qemu
        if shutil.which(qemu) is None:
            raise GuestError(
                f"{qemu} is missing; run: apt-get install {parts.architecture.package}"
            )
        accelerator = _accelerator(parts, settings)
        disk = make_disk(
            scratch,
            parts,
            settings.images,
            command,
            settings.environment,
            repository=settings.repository,
        )
        machine = _Machine(scratch, parts, accelerator, settings)
        booted = time.monotonic()
        output, in_time = machine.run(settings.deadline_s, on_output, disk)
        ended = time.monotonic()
        if not machine.status.isdigit():
            why = "ended early" if in_time else f"was killed after {settings.deadline_s:g} s"
            raise GuestError(
                f"the guest {why}; its command said last:\n{_tail(output)}\n"
                f"and its kernel:\n{_tail(machine.console)}"
            )
        return GuestResult(
            exit_code=int(machine.status),
            output=output,
            console=machine.console,
            accelerator=accelerator,
            kernel=parts.kernel.version,
            prepare_s=booted - began,
            run_s=ended - booted,
        )


class _Machine:
    """One start of QEMU, with its console and the command's exit code in files of `scratch`."""

    def __init__(
        self, scratch: Path, parts: Parts, accelerator: str, settings: GuestSettings
    ) -> None:
        self._parts, self._accelerator, self._settings = parts, accelerator, settings
        self._console, self._status = scratch / "console", scratch / "status"

    @property
    def console(self) -> bytes:
        """What kernel and init wrote on the serial console."""
        return self._console.read_bytes() if self._console.exists() else b""

    @property
    def status(self) -> str:
        """The command's exit code as text; empty if it never ended."""
        return self._status.read_text().strip() if self._status.exists() else ""

    def run(
        self,
        deadline_s: float,
        on_output: Callable[[bytes], object] = lambda _: None,
        disk: Path | None = None,
    ) -> tuple[bytes, bool]:
        """Power on, wait for power off; return the output and whether it was in time."""
        process = subprocess.Popen(
            self._argv(disk), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, cwd="/",
        )  # fmt: skip
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(deadline_s, kill)
        timer.start()
        output = bytearray()
        assert process.stdout is not None
        try:
            while piece := os.read(process.stdout.fileno(), 65536):
                output += piece
                on_output(piece)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
        return bytes(output), not late.is_set()

    def _argv(self, disk: Path | None) -> list[str]:
        made, kernel = self._parts.architecture, self._parts.kernel
        append = f"{made.cmdline} {_CMDLINE}{'' if disk else ' coldframe.probe'}"
        cpu = "max" if self._accelerator == "kvm" else made.cpu
        argv = [
            "setpriv", "--pdeathsig", "KILL", "--",
            made.qemu, "-M", made.machine, "-cpu", cpu, "-accel", self._accelerator,
            "-m", str(self._settings.memory_mib), "-smp", str(self._settings.cpus),
            "-nodefaults", "-no-user-config", "-display", "none", "-nic", "none", "-no-reboot",
            "-kernel", str(kernel.image), "-initrd", str(kernel.initramfs),
            "-append", append, "-serial", f"file:{self._console}",
        ]  # fmt: skip
        if disk is None:
            return argv
        return [
            *argv,
            "-drive", f"id=disk,if=none,format=raw,cache=unsafe,discard=unmap,file={disk}",
            "-device", "virtio-blk-pci,drive=disk", "-device", "virtio-serial-pci",
            "-chardev", "file,id=output,path=/dev/stdout",
            "-chardev", f"file,id=status,path={self._status}",
            "-device", "virtserialport,chardev=output,nr=1",
            "-device", "virtserialport,chardev=status,nr=2",
        ]  # fmt: skip


@contextmanager
def _workspace(cache: Path) -> Iterator[Path]:
    """A scratch directory, alone in the cache; what killed predecessors left is removed."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in cache.glob("scratch-*"):
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(dir=cache, prefix="scratch-") as scratch:
            yield Path(scratch)


def _accelerator(parts: Parts, settings: GuestSettings) -> str:
    """Return kvm only if a guest has booted on it: the device may open and still not serve."""
    tcg = "tcg,thread=multi"
    if parts.is_foreign:
        return tcg
    known = settings.cache / f"accelerator-{platform.release()}-{parts.kernel.version}"
    if known.exists():
        return known.read_text()
    found = tcg
    if Path("/dev/kvm").exists():
        with tempfile.TemporaryDirectory(dir=settings.cache, prefix="scratch-") as scratch:
            machine = _Machine(Path(scratch), parts, "kvm", settings)
            machine.run(_PROBE_DEADLINE_S)
            if b"coldframe: alive" in machine.console:
                found = "kvm"
    known.write_text(found)
    return found


def _tail(data: bytes) -> str:
    return data[-_TAIL_BYTES:].decode("utf-8", "replace")
