"""A directory of a sandbox that one command alone may write, and only by what nobody planted.

A small file system of its own is mounted there, and every open of a file in it is held back until
it is judged: whoever is not of that command is refused; whoever of it has run foreign code
(`provenance`) may write its own logs there, but no file that is vouched for. What a file holds is
read through the mount itself, by no path. A thread judges; it lives as long as the guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import posixpath
import select
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.host import fanotify, forks, syscalls
from coldframe.host.fanotify import (
    ACCESS,
    CLOSE_WRITE,
    MODIFY,
    OPEN,
    OPEN_EXEC,
    OPEN_PERM,
    Change,
    Event,
)
from coldframe.host.provenance import Ledger, may_have_imported, path_of

MOST_CONTENT = (64 << 10) + 1
MOST_REFUSALS = 100
"""That are told of outsiders, and as many of the command's own processes: whoever knocks without
end must not hide what else was refused."""
MOST_WAITING = 500_000
"""Events; the kernel holds about 200 bytes of each."""
_ADMITTED_S = 2.0
_MNT_DETACH = 2
_REALTIME_COARSE = 5
_NEWNS = 0x20000
_NOSUID, _NODEV, _NOEXEC = 0x2, 0x4, 0x8
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Refused:
    """An open that was refused."""

    at: float
    program: str
    name: bytes
    outsider: bool
    """It was no process of the command; else one that had run foreign code."""
    cause: bytes
    """The foreign file; empty for an outsider."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A name in the guarded directory that was asked for."""

    name: bytes
    inode: int
    mode: int
    size: int
    links: int
    vouched: bool
    """It was written, and only by processes of the command that ran no foreign code."""
    content: bytes
    """Of a regular file, at most MOST_CONTENT bytes."""


@dataclass(eq=False)
class Guard:
    """One guarded directory. Made by `begin`, in a thread that may block."""

    sandbox_id: str
    init_pid: int
    root: int
    id_base: int
    names: frozenset[bytes]
    """Files that are vouched for."""
    ledger: Ledger
    mount: int
    listener: fanotify.Listener
    changes: fanotify.ChangeListener
    others: frozenset[str]
    """Cgroups of what lived when it began; if nothing did, who is not known is the command's."""
    refused: list[Refused] = field(default_factory=list)
    """Once for each process and name."""
    lost: bool = False
    """More was opened than could be judged."""
    _command: int = 0
    """Its first process, on the host."""
    _cgroup: str | None = None
    _admitted: threading.Event = field(default_factory=threading.Event)
    _outsiders: dict[int, bool] = field(default_factory=dict)
    _opened: dict[int, bytes] = field(default_factory=dict)
    """Inode → name under which a good process opened it last. Whoever may not open a file has
    made it all the same, empty: to open it says nothing of who made it."""
    _good: dict[bytes, int] = field(default_factory=dict)
    """Name → inode of what a good process wrote under it last."""
    _written: set[int] = field(default_factory=set)
    """Inodes that a good process wrote, having opened them by name."""
    _spoiled: set[int] = field(default_factory=set)
    _struck: set[int] = field(default_factory=set)
    """Those of them that an outsider changed."""
    _judged: dict[int, int] = field(default_factory=dict)
    """Processes that were found good when they opened a file here, and how many foreign sources
    they had looked into; they may have ended."""
    _knocked: set[tuple[int, bytes]] = field(default_factory=set)
    _refusals: Counter[bool] = field(default_factory=Counter)
    """How many are told: of outsiders, and of others."""
    _sealed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    _closed: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to judge."""
        forks.own(self)
        self._thread = threading.Thread(target=self._judge, name="coldframe-guard", daemon=True)
        self._thread.start()

    def admit(self, host_pid: int) -> None:
        """Say which process began the command."""
        self._command, self._cgroup = host_pid, cgroup_of(host_pid)
        self._admitted.set()

    @property
    def touched(self) -> bytes | None:
        """A foreign file that some process of the command has opened; None: none did."""
        return next(iter(self.ledger.touched.values()), None)

    def report(self) -> list[Kept]:
        """Let nobody write any more, and return the named files."""
        self._sealed = True
        with self._lock:
            self._drain()
        return [kept for name in sorted(self.names) if (kept := self._look(name)) is not None]

    def displaced(self, kept: Sequence[Kept]) -> list[bytes]:
        """Return the names under which a good process wrote what is not there any more, or not so.

        Whoever is not of the command can cut a file short by its name.
        """
        there = {one.name: one.inode for one in kept if one.inode not in self._struck}
        good = self._good.items()
        return [n for n, inode in good if n in self.names and there.get(n) != inode]

    def close(self) -> None:
        """Stop judging and give everything back, but for the mount inside. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._close_descriptors()
        # The kernel takes 20 ms for it, and nobody needs to wait.
        for one in (self.listener, self.changes):
            threading.Thread(target=one.close, daemon=True).start()

    def abandon(self) -> None:
        """See `forks.Owner`."""
        self.listener.close()
        self.changes.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self.mount, self.root, self._wake):
            if fd >= 0:
                os.close(fd)
        self.mount = self.root = self._wake = -1

    # --- judging ----------------------------------------------------------------------

    def _judge(self) -> None:
        poll = select.poll()
        poll.register(self.listener.fd, select.POLLIN)
        poll.register(self.changes.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            poll.poll()
            with self._lock:
                if not self._closed:
                    self._bound()
                    self._drain()

    def _bound(self) -> None:
        """Judge no more, and vouch for nothing, once more waits than can be remembered."""
        both = (self.listener, self.changes)
        if not self.lost and max(one.backlog() for one in both) > MOST_WAITING:
            self.lost = True
            for one in both:
                with contextlib.suppress(OSError):  # it spares the kernel, no more
                    one.unwatch(self.mount)

    def _drain(self) -> None:
        device = os.fstat(self.mount).st_dev
        for event in self.listener.events():
            if event.fd < 0:
                self.lost |= bool(event.mask & fanotify.OVERFLOW)
                continue
            allow = False
            try:
                if os.fstat(event.fd).st_dev == device:
                    allow = self._inside(event)
                elif event.pid == os.getpid():
                    self.ledger.note_own(event)
                else:
                    self.ledger.note(event)
            except OSError:
                pass  # it ended under our eyes; what cannot be judged is refused
            finally:
                if event.mask & OPEN_PERM:
                    self.listener.answer(event, allow=allow)
        # Only now, so that what led a process is known when it changes something.
        for change in self.changes.changes():
            if change.inode:
                self._note_change(change)
            else:
                self.lost = True

    def _inside(self, event: Event) -> bool:
        """Return whether an open in the directory itself may go on."""
        if event.pid == os.getpid():
            return True
        name = posixpath.basename(path_of(event.fd))
        if self.is_outsider(event.pid):
            self._admitted.wait(_ADMITTED_S)
        if self._sealed or self.is_outsider(event.pid):
            self._refuse(event.pid, name, b"")
            return False
        why = self._why(event.pid)
        if why is None:
            self._opened[os.fstat(event.fd).st_ino] = name
            self._judged[event.pid] = len(self.ledger.perhaps.get(event.pid, ()))
            return True
        if name not in self.names:
            return True
        self._refuse(event.pid, name, why)
        return False

    def _note_change(self, change: Change) -> None:
        inode = change.inode
        if self._spoils(change.pid):
            self._spoiled.add(inode)
            if self.is_outsider(change.pid):
                self._struck.add(inode)
        elif change.mask & MODIFY and inode in self._opened:
            self._written.add(inode)
            self._good[self._opened[inode]] = inode

    def _spoils(self, pid: int) -> bool:
        """Whether what a process writes is not to be vouched for."""
        ledger = self.ledger
        if self._judged.get(pid) == len(ledger.perhaps.get(pid, ())):
            return pid in ledger.led or pid in ledger.read_by_shell
        return self._why(pid) is not None

    def _why(self, pid: int) -> bytes | None:
        """Return what foreign thing leads a process; None: nothing."""
        ledger = self.ledger
        led = ledger.led.get(pid) or ledger.read_by_shell.get(pid)
        if led is None and pid in ledger.perhaps:
            led = may_have_imported(pid, ledger.perhaps[pid], self.root, self.id_base)
        if led is not None:
            return led
        self._admitted.wait(_ADMITTED_S)
        top = self._command
        try:
            exe = os.readlink(b"/proc/%d/exe" % pid)  # noqa: PTH115 - bytes
            if exe.startswith((b"/memfd:", b"/dev/shm/")):
                return exe
            seen = 0
            while pid != top and seen < 1000:
                pid, seen = _parent(pid), seen + 1
                if pid in {0, 1, self.init_pid}:
                    return b"something whose parent has ended"
                # What it was given to do, and by what, came from a process like this.
                above = ledger.led.get(pid) or ledger.read_by_shell.get(pid)
                if above is None and pid != top:
                    above = ledger.touched.get(pid)
                if above is not None:
                    return above
        except OSError:
            return b"something that has ended"
        return None

    def is_outsider(self, pid: int) -> bool:
        """Whether a process is the sandbox's, but not the command's."""
        known = False if pid == self._command else self._outsiders.get(pid)
        if known is not None:
            return known
        cgroup = cgroup_of(pid)
        if cgroup is None:
            return bool(self.others)
        result = cgroup in self.others and cgroup != self._cgroup
        if result and not self._admitted.is_set():
            return True  # unless it is the command, in the cgroup of one that has just ended
        self._outsiders[pid] = result
        return result

    def _refuse(self, pid: int, name: bytes, cause: bytes) -> None:
        outsider = not cause
        if (pid, name) in self._knocked or self._refusals[outsider] >= MOST_REFUSALS:
            return
        self._knocked.add((pid, name))
        self._refusals[outsider] += 1
        try:
            program = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError):
            program = "?"
        self.refused.append(Refused(time.time(), program, name, outsider, cause))

    def _look(self, name: bytes) -> Kept | None:
        try:
            fd = syscalls.openat2(
                self.mount, name, os.O_PATH | os.O_NOFOLLOW, resolve=syscalls.RESOLVE_BENEATH
            )
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            content = b""
            if stat.S_ISREG(status.st_mode):
                with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:  # noqa: PTH123
                    content = file.read(MOST_CONTENT) or b""
            inode = status.st_ino
            vouched = inode in self._written and inode not in self._spoiled
            return Kept(
                name,
                inode,
                status.st_mode,
                status.st_size,
                status.st_nlink,
                vouched and not self.lost,
                content,
            )
        finally:
            os.close(fd)


def begin(
    sandbox_id: str,
    init_pid: int,
    mount_namespace: int,
    root: int,
    target: int,
    *,
    id_base: int,
    owner: tuple[int, int],
    size_bytes: int,
    names: Sequence[bytes],
    layers: Sequence[Path],
    created_ns: int,
    trusted: Sequence[bytes],
    others: frozenset[str],
) -> Guard:
    """Mount the directory and begin to judge.

    Args:
        mount_namespace: descriptor of the sandbox's.
        root, target: O_PATH descriptors of its root and of the directory, in its namespace.
        owner: host ids.
        created_ns: `file_time_ns` when the sandbox was ready.
    Raises:
        OSError: it cannot be mounted or watched.
    """
    uid, gid = map(str, owner)
    options = {"size": str(size_bytes), "mode": "0700", "uid": uid, "gid": gid}
    mount = syscalls.mount_detached("tmpfs", options, _NOSUID | _NODEV | _NOEXEC)
    listeners: list[fanotify.Listener] = []
    try:
        listeners.append(listener := fanotify.Listener())
        listeners.append(changes := fanotify.ChangeListener(mount))
        _watch(listener, mount, b".", OPEN_PERM)
        _watch(changes, mount, b".", MODIFY | CLOSE_WRITE)
        for place in (b".", b"dev/shm", b"tmp"):
            with contextlib.suppress(FileNotFoundError):
                _watch(listener, root, place, ACCESS | OPEN | OPEN_EXEC | MODIFY | CLOSE_WRITE)
        if fanotify.birth(root).made_ns == 0:
            raise OSError(0, "its file system does not know when files were made")
        ledger = Ledger(created_ns, _next_tick(), layers, trusted, lambda _: False)
        guard = Guard(
            *(sandbox_id, init_pid, os.dup(root), id_base, frozenset(names)),
            *(ledger, mount, listener, changes, others),
        )
        ledger.is_outsider = guard.is_outsider
        in_namespace(mount_namespace, lambda: syscalls.move_mount(mount, target))
        guard.start()
        return guard
    except BaseException:
        os.close(mount)
        for one in listeners:
            one.close()
        raise


def _watch(listener: fanotify.Listener, root: int, place: bytes, events: int) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
    fd = syscalls.openat2(root, place, flags, resolve=resolve)
    try:
        listener.watch(fd, events)
    finally:
        os.close(fd)


def unmount(guard: Guard, mount_namespace: int) -> None:
    """Take the directory away, whoever has files open in it. Raises OSError."""

    def work() -> None:
        os.fchdir(guard.mount)
        if _libc.umount2(b".", _MNT_DETACH) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "umount")

    in_namespace(mount_namespace, work)


def in_namespace(mount_namespace: int, work: Callable[[], None]) -> None:
    """Do something in a mount namespace, in a thread that ends with it. By descriptors only."""

    def enter() -> None:
        syscalls.unshare(syscalls.CLONE_FS)
        if _libc.setns(ctypes.c_int(mount_namespace), _NEWNS) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "setns")
        work()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(enter).result()


def cgroup_of(pid: int) -> str | None:
    """Return a process' cgroup in the unified hierarchy; None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), "")


def _parent(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_bytes()
    return int(text.rpartition(b")")[2].split()[1])


def _next_tick() -> int:
    """Wait until files are made at a later time than now; they carry that of the last tick."""
    now = file_time_ns()
    while (then := file_time_ns()) == now:
        time.sleep(0.0005)
    return then


def file_time_ns() -> int:
    """Return the time that a file made now would have: that of the kernel's last tick."""
    return time.clock_gettime_ns(_REALTIME_COARSE)
