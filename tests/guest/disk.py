"""The guest's disk: an image store, the repository as it is, and the Python that runs it."""

from __future__ import annotations

import compileall
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coldframe.images.store import ImageStore
from tests.fixtures.native import build_probe
from tests.guest.errors import GuestError
from tests.guest.parts import Parts

REPOSITORY = Path(__file__).resolve().parents[2]
_SIZE_BYTES = 6 << 30  # sparse
_COPIED = ("src", "tests", "examples", "benchmarks", "docs", "native", "pyproject.toml")
LEFT_OUT = {  # large, and of no use to a test that runs
    "mypy", "mypyc", "pip", "ruff", "grimp", "importlinter", "setuptools", "_distutils_hack",
    "schemathesis", "jsonschema_rs", "redis", "hypothesis", "graphql",
}  # fmt: skip
_GUEST_PYTHONPATH = "/guest/site-packages:/guest/repository/src:/guest/repository"


def make_disk(
    scratch: Path,
    parts: Parts,
    images: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    repository: bool,
) -> Path:
    """Make a disk below `scratch` that lets the guest run `command` on the first image's tree.

    Args:
        scratch: an empty directory on the file system of the parts' image store.
        images: names of those that the guest gets; its own root is the first of them.
        repository: whether the guest gets a copy of it, and of its Python's packages.

    Raises:
        GuestError: a tool is missing or failed, or the image's Python is not like ours.
        ImageNotFoundError: the store has none of that name.
    """
    tree, disk = scratch / "tree", scratch / "disk"
    for path in ("tmp", "root/upper", "root/work", "guest", "home"):
        (tree / path).mkdir(parents=True)
    (tree / "tmp").chmod(0o1777)
    base = _lay_store(tree, parts.images, images)
    _lay_guest(tree / "guest", parts, command, environment)
    if repository:
        _check_python(base)
        _lay_repository(tree / "guest", parts)
    with disk.open("wb") as file:
        file.truncate(_SIZE_BYTES)
    _make_file_system(disk, tree)
    shutil.rmtree(tree)
    return disk


def _lay_store(tree: Path, images: Path, wanted: Sequence[str]) -> list[Path]:
    """Put images into the disk's store. The files of their layers become hard links.

    Returns the roots of the first one's layers.
    """
    target = tree / "home/images"
    with ImageStore(images) as source, ImageStore(target) as store:
        resolved = [source.resolve(name) for name in wanted]
        for digest in {digest for image in resolved for digest in image.layers}:
            _lay_layer(source.layers_directory / digest, store.layers_directory / digest)
        for image in resolved:
            store.tag(image.name, image.layers, image.config)
        base = resolved[0].layers
        roots = [source.layer_root(digest) for digest in base]
    lowers = [f"/disk/home/images/layers/{digest}/root" for digest in base]
    (tree / "lowerdir").write_text(":".join(lowers))
    return roots


def _lay_layer(source: Path, target: Path) -> None:
    target.mkdir(mode=0o755)
    for record in ("layer.json", "lock"):
        shutil.copy2(source / record, target)
    _run("cp", "--archive", "--link", "--", str(source / "root"), str(target / "root"))


def _check_python(layers: Sequence[Path]) -> None:
    """Compiled packages fit one minor version of Python only."""
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not any((root / "usr/bin" / ours).exists() for root in layers):
        raise GuestError(f"this runs on {ours}, which the guest's image does not have")


def _lay_guest(
    target: Path, parts: Parts, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    shutil.copy2(parts.busybox, target / "busybox")
    shutil.copy2(Path(__file__).with_name("session.sh"), target)
    (target / "repository").mkdir()
    variables = {
        "PYTHONPATH": _GUEST_PYTHONPATH,
        "PYTHONUNBUFFERED": "1",
        "COLDFRAME_TEST_PROBE": "/guest/probe",
        **environment,
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    (target / "command").write_text("\n".join([*lines, f"exec {shlex.join(command)}\n"]))


def _lay_repository(target: Path, parts: Parts) -> None:
    build_probe(target / "probe", parts.architecture.compiler)
    repository = target / "repository"
    for name in _COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, repository / name, symlinks=True, ignore=_unwanted_files)
        elif source.exists():
            shutil.copy2(source, repository)
    if parts.program:
        shutil.copy2(parts.program, repository / "src/coldframe/_native/coldframe-native")
    shutil.copytree(parts.packages, target / "site-packages", ignore=_unwanted_packages)
    # In the guest every CPU second costs several; what can be compiled here is.
    compileall.compile_dir(repository, quiet=2)


def _unwanted_packages(_path: str, names: list[str]) -> list[str]:
    return [name for name in names if name in LEFT_OUT or "__mypyc" in name]


def _unwanted_files(_path: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("build", ".git")]


def _make_file_system(disk: Path, tree: Path) -> None:
    _run(
        "mkfs.ext4", "-q", "-F", "-d", str(tree), "-O", "^has_journal",
        "-E", "lazy_itable_init=1,root_owner=0:0", str(disk),
    )  # fmt: skip


def _run(*argv: str) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise GuestError(f"{argv[0]} failed: {done.stderr.strip()}")
