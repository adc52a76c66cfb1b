"""Make base images from Debian's packages, over the mirror that this machine's apt uses.

No host name is written here: mirrors, proxies and credentials come from apt's own
configuration, and none of the latter two is left in the image.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from coldframe.images import names
from coldframe.images.base import Image, Progress, quiet
from coldframe.images.store import ImageStore
from coldframe.images.unpack import DEFAULT_CONFIG, unpack_tar
from coldframe.images.writer import BLOCK, Metadata, TreeWriter, write_bytes
from coldframe.protocol.errors import (
    CapabilityError,
    ImageError,
    ImageNotFoundError,
    InvalidRequestError,
    Side,
)

PACKAGES = ("ca-certificates", "git", "procps", "python3")
REPORT_S = 15.0
"""How often it is said that mmdebstrap still runs."""

_SUITE = re.compile(r"[a-z][a-z0-9-]{1,30}")
_UNSTABLE = ("sid", "unstable", "experimental")
_CONNECTION = re.compile(
    r"Acquire::(https?::|ftp::|Check-Valid-Until|Check-Date|Retries|ForceIPv[46])", re.I
)
_SLIM = (
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)
_SPACE = "/mnt"
"""Where mmdebstrap, and apt's own user, see the directory that they work in."""
_CONFINED = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", f'mount --bind "$0" {_SPACE} && TMPDIR={_SPACE} "$@"; exit $?'),
)
"""Ends all that a command has started, and what it has mounted, when we are killed; what it has
written lies in a directory of the store, which gc removes."""
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_OFFLINE = re.compile(
    r"Temporary failure resolving|Could not resolve|Could not connect|Unable to connect|"
    r"Network is unreachable|Connection timed out|Connection refused",
    re.I,
)
_NOBODY_USER = b"nobody:x:65534:65534:nobody:/:/bin/false\n"
_NOBODY_GROUP = b"nogroup:x:65534:\n"
_HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_USERINFO = re.compile(r"(?<=://)[^/\s]*@")


class BootstrapError(ImageError):
    """apt or mmdebstrap failed; the message holds the reason."""

    code = "bootstrap_failed"
    side = Side.STARTUP
    retryable = True


def bootstrap(
    store: ImageStore, name: str, *, progress: Progress = quiet, force: bool = False
) -> Image:
    """Return the image `debian:SUITE` or `busybox`, making it if it is absent.

    Args:
        force: make it anew; what had the name stays until the new one is whole.
    Raises:
        InvalidRequestError: a name that cannot be bootstrapped.
        CapabilityError: a tool is missing; the message names the command that installs it.
        BootstrapError: apt or mmdebstrap failed; the message holds the reason.
        StorageFullError: no space is left.
    """
    repository, _, tag = names.normalise(name).partition(":")
    if repository not in ("debian", "busybox") or not _SUITE.fullmatch(tag):
        raise InvalidRequestError(
            f"{name!r} cannot be bootstrapped: write debian:SUITE (debian:bookworm) or busybox; "
            "other images come by coldframe image import or build"
        )
    if repository == "debian" and tag == "latest":
        raise InvalidRequestError("name the suite: debian:bookworm, debian:trixie, ...")
    if not force:
        try:
            image = store.resolve(name)
        except ImageNotFoundError:
            progress(f"making {name}")
        else:
            progress(f"{image.name} is there already")
            return image
    with store.workspace() as work:
        tree = work / "tree"
        tree.mkdir(mode=0o755)
        if repository == "debian":
            _debian(tag, tree, work, progress)
        else:
            _busybox(tree, work, progress)
        layer = store.add_layer(tree)
    return store.tag(name, [layer], DEFAULT_CONFIG)


# --- Debian ---------------------------------------------------------------------------------


def _debian(suite: str, tree: Path, work: Path, progress: Progress) -> None:
    if shutil.which("mmdebstrap") is None:
        raise CapabilityError("mmdebstrap is missing; run: apt-get install mmdebstrap")
    space = work / "tmp"
    space.mkdir(mode=0o1777)
    options = space / "apt.conf"
    options.write_text("\n".join(connection_options(_output("apt-config", "dump"))) + "\n")
    sources = work / "sources.list"
    sources.write_text("\n".join(own_sources(_index_targets(), _own_suite(), suite)) + "\n")
    command = [
        *_CONFINED,
        str(space),
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(PACKAGES)}",
        f"--aptopt={_SPACE}/{options.name}",
        *_SLIM,
        suite,
        "-",
    ]
    if sources.stat().st_size > 1:
        command.append("-")  # on stdin, since a mirror's address may hold a password
    progress(f"mmdebstrap {suite} with {', '.join(PACKAGES)}")
    with _reported(progress), _running(command, sources, work / "log") as stream:
        unpack_tar(stream, tree, f"debian:{suite}", progress)
    _finish_debian(tree)


def connection_options(dump: str) -> list[str]:
    """Return the lines of `apt-config dump` that say how to reach a mirror."""
    auth = ['Dir::Etc::netrc "/etc/apt/auth.conf";', 'Dir::Etc::netrcparts "/etc/apt/auth.conf.d";']
    return auth + [line for line in dump.splitlines() if _CONNECTION.match(line)]


def own_sources(targets: str, own_suite: str | None, suite: str) -> list[str]:
    """Return lines of a sources.list that fetch `suite` where this machine fetches its own.

    `targets` holds lines `URI RELEASE COMPONENT` of apt's index targets. Empty when this
    machine's own suite is not among them; mmdebstrap's default mirror is used then.
    """
    signed = f'[signed-by="{_KEYRING}"] ' if _KEYRING.exists() else ""
    lines: dict[str, None] = {}
    for line in targets.splitlines():
        uri, release, component = line.split(" ")
        kind = release.removeprefix(own_suite) if own_suite else release
        if component != "main" or kind == release:
            continue
        if kind not in ("", "-updates", "-security") or (kind and suite in _UNSTABLE):
            continue
        for reachable in _reachable(uri):
            lines[f"deb {signed}{reachable} {suite}{kind} main"] = None
    return list(lines) if any(f" {suite} main" in line for line in lines) else []


def _reachable(uri: str) -> list[str]:
    """Return the URI, or the first that a mirror list on this machine names."""
    if uri.startswith("mirror+file:"):
        listed = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
        words = [line.split() for line in listed.read_text().splitlines()]
        return [word[0] for word in words if word and not word[0].startswith("#")][:1]
    return [uri] if re.match(r"(https?|ftp|tor\+https?)://", uri) else []


def _index_targets() -> str:
    return _output(
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    )


def _own_suite() -> str | None:
    """Return this machine's own Debian suite; None on another distribution."""
    fields = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    return fields.get("VERSION_CODENAME") if fields.get("ID") == "debian" else None


def _finish_debian(tree: Path) -> None:
    """Take this machine's traces out: its name, resolver, proxies and passwords."""
    with TreeWriter(tree) as writer:
        _put(writer, "etc/hosts", _HOSTS)
        _put(writer, "etc/hostname", b"sandbox\n")
        _put(writer, "etc/resolv.conf", b"")
        for path in ("etc/apt/sources.list", "etc/apt/sources.list.d/0000.list"):
            if (content := writer.read(path.encode())) is not None:
                _put(writer, path, without_passwords(content.decode()).encode())
        writer.remove(b"etc/apt/apt.conf.d/99mmdebstrap")


def without_passwords(text: str) -> str:
    """Return text with user names and passwords taken out of its addresses."""
    return _USERINFO.sub("", text)


# --- busybox --------------------------------------------------------------------------------


def _busybox(tree: Path, work: Path, progress: Progress) -> None:
    program = _static_busybox(work, progress)
    applets = _output(str(program), "--list-full").split()
    with TreeWriter(tree) as writer:
        for path in ("bin", "dev", "etc", "home", "proc", "sbin", "sys", "usr/bin", "var"):
            writer.directory(path.encode(), Metadata(0o755))
        writer.directory(b"root", Metadata(0o700))
        writer.directory(b"tmp", Metadata(0o1777))
        writer.file(b"bin/busybox", Metadata(0o755), write_bytes(program.read_bytes()))
        for applet in applets:
            if applet != "bin/busybox":
                writer.link(applet.encode(), b"/bin/busybox", Metadata(0o777))
        _put(writer, "etc/hosts", _HOSTS)
        _put(writer, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n" + _NOBODY_USER)
        _put(writer, "etc/group", b"root:x:0:\n" + _NOBODY_GROUP)


def _static_busybox(work: Path, progress: Progress) -> Path:
    """Return a static busybox: this machine's own, or the one of Debian's package."""
    for candidate in (Path("/bin/busybox"), Path("/usr/bin/busybox")):
        if candidate.is_file() and is_static(candidate):
            return candidate
    if shutil.which("apt-get") is None:
        raise CapabilityError("no static busybox; run: apt-get install busybox-static")
    progress("downloading busybox-static")
    _output("apt-get", "-q", "download", "busybox-static", cwd=work)
    package = next(work.glob("busybox-static_*.deb"))
    _output("dpkg-deb", "-x", str(package), str(work / "package"))
    return next(path for path in (work / "package").rglob("busybox") if path.is_file())


def is_static(program: Path) -> bool:
    """Whether a 64-bit little-endian ELF program needs no loader."""
    with program.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return False
        offset, size, count = (
            int.from_bytes(header[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58))
        )
        file.seek(offset)
        segments = file.read(size * count)
    kinds = (segments[i * size : i * size + 4] for i in range(count))
    return b"\x03\0\0\0" not in kinds


# --- programs -------------------------------------------------------------------------------


def _put(writer: TreeWriter, path: str, content: bytes) -> None:
    writer.file(path.encode(), Metadata(0o644), write_bytes(content))


def _output(*command: str, cwd: Path | None = None) -> str:
    """Run a short program and return what it printed.

    Raises:
        CapabilityError: there is no such program.
        BootstrapError: it failed.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=cwd,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    except FileNotFoundError:
        raise CapabilityError(
            f"{command[0]} is missing: bootstrapping needs Debian's apt"
        ) from None
    if done.returncode != 0:
        log = done.stderr.decode("utf-8", "replace")
        raise BootstrapError(_why(command[0], done.returncode, log))
    return done.stdout.decode("utf-8", "replace")


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Say from time to time that it still runs: a slow mirror is silent for minutes."""
    ended = threading.Event()
    begun = time.monotonic()

    def report() -> None:
        while not ended.wait(REPORT_S):
            progress(f"still running after {time.monotonic() - begun:.0f} s")

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _running(command: list[str], stdin: Path, log: Path) -> Iterator[IO[bytes]]:
    """Run a program whose stdout is read as it comes; `log` takes its stderr.

    Raises:
        BootstrapError: it failed; this explains better than what its output lacks.
    """
    with stdin.open("rb") as source, log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=_environment(),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # mmdebstrap that is ended hangs up on its whole group: not on us
        )
    assert process.stdout is not None
    failure: ImageError | None = None
    try:
        yield process.stdout
    except ImageError as error:
        failure = error
        while process.stdout.read(BLOCK):
            pass  # let it end by itself, so that its exit code says whose failure it was
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # it removes its own temporary files
        raise
    finally:
        process.stdout.close()
        code = process.wait()
    if code != 0:
        text = log.read_text(errors="replace")
        raise BootstrapError(_why("mmdebstrap", code, text)) from failure
    if failure is not None:
        raise failure


def _environment() -> dict[str, str]:
    """Return this process's environment with messages in English: reasons are read from them."""
    return {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def _why(program: str, code: int, log: str) -> str:
    log = without_passwords(log)
    lines = [line for line in log.splitlines() if line.startswith(("E: ", "Err:"))]
    reasons = [line for line in lines if line.startswith("E: ")] or lines
    shown = "; ".join(reasons[:2]) or log[-300:].strip() or "it gave no reason"
    if _OFFLINE.search(log):
        return f"no network: apt cannot reach its mirror ({shown})"
    return f"{program} failed with exit code {code}: {shown}"
