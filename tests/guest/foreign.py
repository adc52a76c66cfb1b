"""A guest's parts for aarch64, from Debian's and Python's packages; nothing of them is installed.

`mmdebstrap` unpacks kernel and user land without running anything of them, and pip fetches the
packages that hold machine code. What is made is kept until apt knows a newer kernel, or this
environment has other packages.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from coldframe.images.bootstrap import connection_options, own_sources
from coldframe.images.store import ImageStore
from coldframe.images.unpack import DEFAULT_CONFIG
from tests.guest.disk import LEFT_OUT, REPOSITORY
from tests.guest.errors import GuestError
from tests.guest.kernel import Kernel, build_initramfs, candidate, run_tool
from tests.guest.parts import AARCH64, Parts

_SUITE = "bookworm"
_PACKAGES = (
    *("linux-image-cloud-arm64", "busybox-static", "base-passwd", "dash", "bash", "coreutils"),
    *("sed", "grep", "findutils", "tar", "gzip", "procps", "util-linux", "python3", "git"),
)
_OWN = Path(sysconfig.get_path("purelib"))
_WHEELS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64", "manylinux_2_34_aarch64")


def aarch64_parts(cache: Path) -> Parts:
    """Return all that a guest on aarch64 needs, fetching it the first time (150 MB).

    Raises:
        GuestError: a tool is missing, or a download failed.
    """
    _package, version = candidate()
    key = hashlib.sha256(repr((_PACKAGES, _distributions())).encode()).hexdigest()[:12]
    place = cache / f"{AARCH64.name}-{version}-{key}"
    if not place.is_dir():
        for stale in cache.glob(f"{AARCH64.name}-*"):
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(dir=cache, prefix="scratch-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _make(made, Path(scratch))
            made.rename(place)
    program = _build_program(place)
    kernel = Kernel(version, place / "vmlinuz", build_initramfs(place, place / "busybox"))
    return Parts(
        AARCH64, kernel, place / "images", place / "busybox", place / "site-packages", program
    )


def _make(made: Path, scratch: Path) -> None:
    tree = scratch / "tree"
    _unpack(tree, scratch)
    (image,) = (tree / "boot").glob("vmlinuz-*")
    image.rename(made / "vmlinuz")
    (modules,) = (tree / "lib/modules").iterdir()
    modules.rename(made / "modules")
    shutil.copy2(tree / "bin/busybox", made)
    shutil.rmtree(tree / "dev")  # an image's layers hold no devices
    (tree / "dev").mkdir()
    # What the packages' scripts would have done.
    for name in ("passwd", "group"):
        shutil.copy(tree / f"usr/share/base-passwd/{name}.master", tree / "etc" / name)
    (tree / "etc/hosts").write_text("127.0.0.1\tlocalhost\n::1\tlocalhost\n")
    with ImageStore(made / "images") as store:
        store.tag(f"debian:{_SUITE}", [store.add_layer(tree)], DEFAULT_CONFIG)
    _install_packages(made / "site-packages")


def _unpack(tree: Path, scratch: Path) -> None:
    options, sources = scratch / "apt.conf", scratch / "sources.list"
    options.write_text("\n".join(connection_options(run_tool("apt-config", "dump"))) + "\n")
    targets = run_tool(
        *("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"),
        "Created-By: Packages",
    )
    sources.write_text("\n".join(own_sources(targets, _SUITE, _SUITE)) + "\n")
    run_tool(
        *("mmdebstrap", "--mode=root", "--architectures=arm64", "--variant=extract"),
        *("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", f"--aptopt={options}"),
        *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"),
        *("--format=directory", f"--include={','.join(_PACKAGES)}", _SUITE, str(tree)),
        *([str(sources)] if sources.stat().st_size > 1 else []),
    )


def _distributions() -> list[tuple[str, str, bool]]:
    """Name, version, and whether it holds machine code, of each that the guest gets."""
    return sorted(
        (found.name, found.version, any(file.suffix == ".so" for file in found.files or ()))
        for found in importlib.metadata.distributions(path=[str(_OWN)])
        if not {file.parts[0] for file in found.files or ()} & LEFT_OUT
    )


def _install_packages(target: Path) -> None:
    """Lay this environment's packages, with machine code of the other architecture."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", *LEFT_OUT)
    shutil.copytree(_OWN, target, ignore=ignored)
    wanted = [f"{name}=={version}" for name, version, compiled in _distributions() if compiled]
    run_tool(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
        *("--only-binary=:all:", "--implementation", "cp", f"--target={target}"),
        *("--python-version", f"{sys.version_info.major}.{sys.version_info.minor}"),
        *(f"--platform={wheel}" for wheel in _WHEELS),
        *wanted,
    )


def _build_program(place: Path) -> Path:
    """Cross-compile the native program; make does nothing if it is as new as its sources."""
    if shutil.which(AARCH64.compiler) is None:
        raise GuestError(
            f"{AARCH64.compiler} is missing; run: apt-get install gcc-aarch64-linux-gnu "
            "libc6-dev-arm64-cross"
        )
    build = place / "build"
    done = subprocess.run(
        ["make", "-C", str(REPOSITORY / "native"), f"CC={AARCH64.compiler}", f"BUILD={build}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise GuestError(f"the native program does not compile for aarch64:\n{done.stderr}")
    return build / "coldframe-native"
