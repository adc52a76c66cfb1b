"""Ask the machine what it can do: one check per thing that sandboxes need or profit from.

Every check tries the thing itself where that is harmless, leaves nothing behind, and says what
helps. Needs root for most; without it the checks say so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from coldframe.host import cgroups, syscalls
from coldframe.host.egress import steering
from coldframe.host.pools import BtrfsStorage
from coldframe.host.space import file_system_of
from coldframe.protocol.errors import CapabilityError, StorageFullError
from coldframe.protocol.ids import new_node_id

_NEEDED_CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_admin": 12,
    "sys_chroot": 18,
    "sys_ptrace": 19,
    "sys_admin": 21,
    "mknod": 27,
}
_LEAST_KERNEL = (6, 1)
_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_DESCRIPTORS_WANTED = 16384
_PIDS_WANTED = 32768
_DISK_WANTED = 5 << 30
_MEMORY_WANTED = 2 << 30
_PROBE_BYTES = 256 << 20


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    """What was found, in one line."""
    remedy: str = ""
    """A command or a sentence that helps; empty when nothing is missing."""
    required: bool = True
    """Whether nothing works without it."""


_AS_ROOT = "root is needed, also to tell what else is missing: sudo coldframe doctor"
_ALLOW_IT = (
    "the kernel, or the container that this runs in, does not allow it: in a container, run it "
    "with --privileged"
)
_WITHOUT_ROOT = (
    "real sandboxes need root: sudo coldframe doctor. Without it, use a node that root runs "
    "(sudo coldframe serve --listen 127.0.0.1:8080) by COLDFRAME_URL=http://127.0.0.1:8080"
)


class _UnmetError(Exception):
    """A check's own way to say no."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


class _NoRightsError(_UnmetError):
    """What may be for want of root alone, whatever else would help."""


def examine(home: Path) -> tuple[Check, ...]:
    """Run every check.

    Args:
        home: COLDFRAME_HOME; its file system, space and locks are what count. Made if missing.
    """
    return tuple(_run(name, required, probe) for name, required, probe in _probes(home))


def _probes(home: Path) -> Iterator[tuple[str, bool, Callable[[], str]]]:
    yield "root", True, _root
    yield "kernel", True, _kernel
    yield "capabilities", True, _capabilities
    yield "native program", True, _program
    yield "openat2", True, _openat2
    yield "mount api", True, _mount_api
    yield "user namespaces", True, _user_namespaces
    yield "pidfd", True, _pidfd
    yield "seccomp", True, _seccomp
    yield "overlay", True, lambda: _file_system("overlay")
    yield "cgroups", True, _cgroups
    yield "home", True, lambda: _home(home)
    yield "idmapped mounts", True, lambda: _idmapped(home)
    yield "disk space", True, lambda: _disk(home)
    yield "memory", True, _memory
    yield "btrfs pool", False, lambda: _btrfs(home)
    yield "egress", False, _egress
    yield "mmdebstrap", False, lambda: _tool("mmdebstrap", "mmdebstrap")
    yield "open files", False, _open_files
    yield "process ids", False, _process_ids


def _run(name: str, required: bool, probe: Callable[[], str]) -> Check:
    error: Exception
    try:
        return Check(name, True, probe(), required=required)
    except _UnmetError as unmet:
        error, detail, remedy = unmet, str(unmet), unmet.remedy
    except (CapabilityError, StorageFullError) as missing:
        error = missing
        detail, _, remedy = str(missing).partition("; ")
    except OSError as refused:
        error, detail = refused, describe_refusal(refused)
        remedy = _AS_ROOT if os.geteuid() != 0 else _ALLOW_IT
    if os.geteuid() != 0 and name != "root" and _for_want_of_rights(error):
        remedy = _AS_ROOT  # whatever else would help cannot be told yet
    return Check(name, False, detail, remedy, required)


def _for_want_of_rights(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, PermissionError | _NoRightsError):
            return True
        error = error.__cause__
    return False


def describe_refusal(error: OSError) -> str:
    """Say what was refused to whom: what cannot be reached is not what is not there."""
    if not (isinstance(error, PermissionError) and isinstance(error.filename, str)):
        return str(error.strerror or error)
    path = Path(error.filename)
    closed = next((up for up in reversed(path.parents) if not os.access(up, os.X_OK)), None)
    wanted = f"enter {closed}, where {path} lies" if closed else f"use {path}"
    return f"user {os.geteuid()} may not {wanted}"


def _there(path: Path) -> bool:
    """Whether there is such a file. Raises PermissionError where that cannot be seen."""
    try:
        path.stat()  # `exists` takes what cannot be reached for missing, from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_program(path: Path) -> bool:
    """Whether there is a program. Raises PermissionError if it may be one for root alone."""
    if not _there(path):
        return False
    able = os.access(path, os.X_OK)
    if not able and os.geteuid() != 0:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return able


# --- the kernel -----------------------------------------------------------------------


def _root() -> str:
    if os.geteuid() != 0:
        raise _UnmetError(f"user {os.geteuid()}", _WITHOUT_ROOT)
    return "user 0"


def _kernel() -> str:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if platform.system() != "Linux" or numbers < _LEAST_KERNEL:
        raise _UnmetError(
            f"{platform.system()} {release}",
            f"Linux {_LEAST_KERNEL[0]}.{_LEAST_KERNEL[1]} or later is needed",
        )
    return f"Linux {release} {platform.machine()}"


def _egress() -> str:
    reason = steering.refusal()
    if reason is not None:
        raise _NoRightsError(*reason.partition("; ")[::2])
    return "network policies can be enforced (sk_lookup)"


def _capabilities() -> str:
    have = syscalls.effective_capabilities()
    missing = [name for name, bit in _NEEDED_CAPABILITIES.items() if not have >> bit & 1]
    if missing:
        raise _NoRightsError(
            f"missing: {', '.join(missing)}",
            "in a container, run it with --privileged or --cap-add for each",
        )
    return "all that are needed"


def _program() -> str:
    path = Path(str(resources.files("coldframe") / "_native" / "coldframe-native"))
    if not _is_program(path):
        raise _UnmetError(f"{path} is missing", "make setup")
    return str(path)


def _openat2() -> str:
    rules = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
    os.close(syscalls.openat2(-100, b"/", os.O_PATH, resolve=rules))
    return "RESOLVE_IN_ROOT"


def _mount_api() -> str:
    mount = syscalls.mount_detached("tmpfs", {"size": "4096"})
    try:
        os.close(syscalls.open_tree(mount))
        detail = "detached mounts, and clones of them"
    except OSError:
        detail = "detached mounts, no clones of them (Linux 6.15)"
    finally:
        os.close(mount)
    return detail


def _user_namespaces() -> str:
    limit = int(Path("/proc/sys/user/max_user_namespaces").read_text())
    if limit < 1:
        raise _UnmetError("user.max_user_namespaces is 0", "sysctl user.max_user_namespaces=65536")
    return f"at most {limit}"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "pidfd_open"


def _seccomp() -> str:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if not _there(actions) or "errno" not in actions.read_text().split():
        raise _UnmetError("no seccomp filters", "a kernel with CONFIG_SECCOMP_FILTER is needed")
    return "filters"


def _file_system(name: str) -> str:
    listed = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if name not in listed:
        raise _UnmetError(f"{name} is not known to the kernel", f"modprobe {name}")
    return name


def _cgroups() -> str:
    """Make the directories that a node would make, and remove them again."""
    made = cgroups.make_node_cgroups(new_node_id())
    try:
        driver = "hybrid" if "memory" in made.paths else "v2"
        missing = {"cpu", "memory", "pids"} - made.limits
        if missing:
            raise _UnmetError(
                f"{driver}, without {', '.join(sorted(missing))}",
                "systemd-run --scope -p Delegate=yes COMMAND",
            )
        return f"{driver}: {', '.join(sorted(made.limits))} at {made.paths['unified'].parent}"
    finally:
        made.remove()


# --- the store, tools, sizes ----------------------------------------------------------


def _home(home: Path) -> str:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _UnmetError(
            f"{home}: {describe_refusal(error)}",
            "set COLDFRAME_HOME to a directory that can be written",
        ) from error
    if not os.access(home, os.W_OK):
        raise _NoRightsError(
            f"user {os.geteuid()} cannot write {home}",
            "set COLDFRAME_HOME to a directory that can be written",
        )
    return f"{home} on {file_system_of(home)}"


def _idmapped(home: Path) -> str:
    """Whether the store's file system can be seen under other ids."""
    kind = file_system_of(home)
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        tree = syscalls.open_tree(fd)
        try:
            with _id_mapping() as namespace:
                syscalls.idmap_mount(tree, namespace)
        finally:
            os.close(tree)
    except OSError as error:
        raise _UnmetError(
            f"{kind}: {error.strerror}",
            "set COLDFRAME_HOME to a directory on ext4, xfs or btrfs",
        ) from error
    finally:
        os.close(fd)
    return kind


@contextlib.contextmanager
def _id_mapping() -> Iterator[int]:
    """A user namespace's descriptor, kept alive by a child for as long as the block."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(ready[1], b"x")
            os.close(go[1])
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        if not os.read(ready[0], 1):
            raise OSError(1, "no user namespace can be made")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text("0 2147483648 65536\n")
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield namespace
        finally:
            os.close(namespace)
    finally:
        for fd in (ready[0], *go):
            os.close(fd)
        os.waitpid(pid, 0)


def _btrfs(home: Path) -> str:
    """Make a small pool and give it back."""
    storage = BtrfsStorage(home / "pools", new_node_id(), size_bytes=_PROBE_BYTES)
    try:
        os.close(storage.make("probe", _PROBE_BYTES // 2))
    finally:
        storage.close()
    return "uppers with limits"


def _tool(name: str, package: str) -> str:
    path = shutil.which(name, path=_PATH)
    if path is None and not any(_is_program(Path(place, name)) for place in _PATH.split(":")):
        raise _UnmetError(f"{name} is missing", f"apt-get install {package}")
    return str(path)


def _disk(home: Path) -> str:
    status = os.statvfs(home)
    free = status.f_bavail * status.f_frsize
    detail = f"{free / (1 << 30):.1f} GiB free in {home}"
    if free < _DISK_WANTED:
        raise _UnmetError(detail, f"free {_DISK_WANTED >> 30} GiB, or set COLDFRAME_HOME elsewhere")
    return detail


def _memory() -> str:
    lines = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(lines["MemAvailable"].split()[0]) << 10
    detail = f"{free / (1 << 30):.1f} GiB available"
    if free < _MEMORY_WANTED:
        raise _UnmetError(detail, f"{_MEMORY_WANTED >> 30} GiB are wanted: run fewer sandboxes")
    return detail


def _open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (at most {hard})"
    if soft < _DESCRIPTORS_WANTED:
        raise _UnmetError(detail, f"ulimit -n {min(hard, _DESCRIPTORS_WANTED)}")
    return detail


def _process_ids() -> str:
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    if limit < _PIDS_WANTED:
        raise _UnmetError(str(limit), "sysctl kernel.pid_max=4194304")
    return str(limit)
