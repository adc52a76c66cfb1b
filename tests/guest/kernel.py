"""Debian's own kernel, fetched by package name and unpacked in a cache; never installed."""

from __future__ import annotations

import gzip
import lzma
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.guest.errors import GuestError

_META_PACKAGE = "linux-image-cloud-amd64"
_MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "overlay", "loop", "btrfs")
_INIT = Path(__file__).with_name("initramfs.sh")
BUSYBOX = Path("/bin/busybox")


@dataclass(frozen=True)
class Kernel:
    """A kernel that is unpacked on disk, and the first user land that it boots to."""

    version: str
    image: Path
    initramfs: Path


def fetch_kernel(cache: Path) -> Kernel:
    """Return the kernel that apt would install, downloading it the first time (27 MB).

    Raises:
        GuestError: apt knows no such package, or a download or unpacking failed.
    """
    package, version = candidate()
    place = cache / f"kernel-{version}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch:
            made = _unpack(package, version, Path(scratch))
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # else another process was faster
                    raise
    return Kernel(version, place / "vmlinuz", build_initramfs(place, BUSYBOX))


def load_order(modules: Path, wanted: Sequence[str]) -> list[Path]:
    """Return the files of `wanted` and of all they depend on, each after what it needs.

    Raises:
        GuestError: the kernel has neither the module nor says that it is built in.
    """
    files = {_module_name(path): path for path in modules.rglob("*.ko*")}
    builtin = {
        _module_name(Path(line)) for line in (modules / "modules.builtin").read_text().splitlines()
    }
    order: list[Path] = []

    def visit(name: str) -> None:
        if name in builtin:
            return
        if name not in files:
            raise GuestError(f"the kernel in {modules} has no module {name!r}")
        for needed in _dependencies(_module_bytes(files[name])):
            visit(needed)
        if files[name] not in order:
            order.append(files[name])

    for name in wanted:
        visit(name)
    return order


def candidate() -> tuple[str, str]:
    """Return package and version of the kernel that apt would install."""
    shown = run_tool("apt-cache", "show", "--no-all-versions", _META_PACKAGE)
    found = re.search(r"^Depends: (linux-image-\S+) \(= (\S+)\)", shown, re.MULTILINE)
    if found is None:
        raise GuestError(f"apt knows no kernel behind {_META_PACKAGE}; run: apt-get update")
    return found[1], found[2]


def _unpack(package: str, version: str, scratch: Path) -> Path:
    run_tool(
        "apt-get",
        "--option=APT::Sandbox::User=root",
        "download",
        f"{package}={version}",
        cwd=scratch,
    )
    (archive,) = scratch.glob("*.deb")
    tree, made = scratch / "tree", scratch / "made"
    run_tool("dpkg-deb", "--extract", str(archive), str(tree))
    made.mkdir()
    (image,) = (tree / "boot").glob("vmlinuz-*")
    image.rename(made / "vmlinuz")
    library = "usr/lib" if (tree / "usr/lib/modules").is_dir() else "lib"
    (modules,) = (tree / library / "modules").iterdir()
    modules.rename(made / "modules")
    return made


def build_initramfs(place: Path, busybox: Path) -> Path:
    """Return an initramfs with the modules below `place`, made anew."""
    if not busybox.exists():
        raise GuestError(f"{busybox} is missing; run: apt-get install busybox-static")
    order = load_order(place / "modules", _MODULES)
    archive = _Cpio()
    for directory in ("bin", "modules"):
        archive.add(directory, 0o040755)
    archive.add("bin/busybox", 0o100755, busybox.read_bytes())
    archive.add("init", 0o100755, _INIT.read_bytes())
    for number, path in enumerate(order):
        archive.add(f"modules/{number:02}.ko", 0o100644, _module_bytes(path))
    target = place / "initramfs"
    with tempfile.NamedTemporaryFile(dir=place, prefix="initramfs-", delete=False) as file:
        file.write(archive.finish())
    return Path(file.name).replace(target)


class _Cpio:
    """A writer of the kernel's initramfs format (newc)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0

    def add(self, name: str, mode: int, content: bytes = b"") -> None:
        self._inode += 1
        raw = name.encode() + b"\0"
        numbers = (self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(raw), 0)
        header = b"070701" + b"".join(b"%08X" % number for number in numbers)
        self._parts += [_padded(header + raw), _padded(content)]

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _module_name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    return gzip.decompress(data) if path.suffix == ".gz" else data


def _dependencies(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    names = found[1].decode().split(",") if found else []
    return [name.replace("-", "_") for name in names if name]


def run_tool(*argv: str, cwd: Path | None = None) -> str:
    """Run a program of the host's and return what it printed.

    Raises:
        GuestError: it is missing, or failed.
    """
    if shutil.which(argv[0]) is None:
        raise GuestError(f"{argv[0]} is missing; the guest needs a Debian host")
    done = subprocess.run(
        argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise GuestError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout
