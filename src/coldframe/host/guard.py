"""A directory of a sandbox that one command alone may write, and only by what nobody planted.

A small file system of its own is mounted there (`guard_mount`), and every open of a file in it is
held back until it is judged: whoever is not of that command (`guard_command`) is refused; whoever
of it has run foreign code (`provenance`) may write its own logs there, but no file that is vouched
for (`guard_writes`). What a file holds is read through the mount itself, by no path. A thread
judges; it lives as long as the guard.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import select
import stat
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coldframe.host import fanotify, forks, syscalls
from coldframe.host.fanotify import MODIFY, OPEN_EXEC_PERM, OPEN_PERM, Change, Event
from coldframe.host.guard_command import GuardedCommand
from coldframe.host.guard_holds import Holds
from coldframe.host.guard_writes import Writes
from coldframe.host.process_facts import Facts, facts_of, parent_of, started_of
from coldframe.host.provenance import Ledger, may_have_imported, path_of
from coldframe.host.roottree import closing

MOST_CONTENT = (64 << 10) + 1
MOST_REFUSALS = 100
"""That are told of outsiders, and as many of the command's own processes: whoever knocks without
end must not hide what else was refused."""
_ENDED = b"something that has ended"
MOST_WAITING = 500_000
"""Events; the kernel holds about 200 bytes of each."""
Watched = tuple[int, fanotify.Listener, fanotify.ChangeListener, Holds]
"""A mount's descriptor, who holds back opens in it and tells of those in the rest of the sandbox,
who tells of changes in it, and what is held back in the rest."""


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


class Guard:
    """One guarded directory, once it is mounted. Blocks."""

    def __init__(
        self,
        watched: Watched,
        command: GuardedCommand,
        ledger: Ledger,
        names: frozenset[bytes],
        *,
        root: int,
        id_base: int,
        init_pid: int,
    ) -> None:
        """Judge who may write in what is `watched`, for the `command`.

        Args:
            ledger: what is known of the rest of the sandbox.
            names: files that are vouched for.
            root: O_PATH descriptor of the sandbox's root; like what is watched, taken over.
            id_base, init_pid: first host id of the sandbox, and its pid 1 on the host.
        """
        self.mount, self._listener, self._changes, self._holds = watched
        self.command, self._ledger, self._names = command, ledger, names
        self._root, self._id_base, self._init_pid = root, id_base, init_pid
        self.refused: list[Refused] = []
        """Once for each process and name."""
        self._knocked: set[tuple[int, bytes]] = set()
        self._refusals: Counter[bool] = Counter()
        """How many are told: of outsiders, and of others."""
        self.lost = False
        """More was opened than could be judged."""
        self._writes = Writes()
        self._judged: dict[int, str] = {}
        """Process that was found good when it opened a file here → when it started."""
        self._sealed = self._closed = False
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to judge."""
        forks.own(self)
        self._thread = threading.Thread(target=self._judge, name="coldframe-guard", daemon=True)
        self._thread.start()

    @property
    def touched(self) -> bytes | None:
        """A foreign file that some process of the command has opened; None: none did."""
        return next(iter(self._ledger.touched.values()), None)

    def report(self) -> list[Kept]:
        """Let nobody write any more, and return the named files."""
        self._sealed = True
        with self._lock:
            self._drain()
        return [kept for name in sorted(self._names) if (kept := self._look(name)) is not None]

    def displaced(self, kept: Sequence[Kept]) -> list[bytes]:
        """Return which named files the command wrote and are not there any more, or not so."""
        there = {one.name: one.inode for one in kept}
        return [name for name in self._writes.displaced(there) if name in self._names]

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
        for one in (self._listener, self._changes):
            threading.Thread(target=one.close, daemon=True).start()

    def abandon(self) -> None:
        """See `forks.Owner`."""
        self._listener.close()
        self._changes.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self.mount, self._root, self._wake):
            if fd >= 0:
                os.close(fd)
        self.mount = self._root = self._wake = -1
        self._holds.close()

    # --- judging ----------------------------------------------------------------------

    def _judge(self) -> None:
        poll = select.poll()
        poll.register(self._listener.fd, select.POLLIN)
        poll.register(self._changes.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            poll.poll()
            with self._lock:
                if not self._closed:
                    self._bound()
                    self._drain()

    def _bound(self) -> None:
        """Judge no more, and vouch for nothing, once more waits than can be remembered."""
        both = (self._listener, self._changes)
        if not self.lost and max(one.backlog() for one in both) > MOST_WAITING:
            self.lost = True
            for one in both:
                with contextlib.suppress(OSError):  # it spares the kernel, no more
                    one.unwatch(self.mount)

    def _drain(self) -> None:
        device = os.fstat(self.mount).st_dev
        ended = {pid: one for pid, one in self._judged.items() if started_of(pid) != one}
        # First, so that all that led a process before it changed something is known then.
        changes = list(self._changes.changes())
        for event in self._listener.events():
            if event.fd < 0:
                self.lost |= bool(event.mask & fanotify.OVERFLOW)
            else:
                self._note_event(event, device)
        for change in changes:
            if change.inode:
                self._note_change(change)
            else:
                self.lost = True
        for pid, started in ended.items():
            # All that it did is noted; whatever comes now is of another process with its pid.
            if self._judged[pid] == started:
                del self._judged[pid]
                self._ledger.forget(pid)
        self._hold_opens()

    def _note_event(self, event: Event, device: int) -> None:
        """Draw conclusions from what was opened, and answer if it is held back."""
        inside = os.fstat(event.fd).st_dev == device
        allow = not inside
        try:
            if inside:
                allow = self._inside(event)
            elif event.pid == os.getpid():
                self._ledger.note_own(event)
            else:
                self._follow(event)
        except OSError:
            pass  # it ended under our eyes; what cannot be judged is refused
        finally:
            if event.mask & (OPEN_PERM | OPEN_EXEC_PERM):
                self._listener.answer(event, allow=allow)

    def _follow(self, event: Event) -> None:
        """Know what a process has become that is remembered here, and what it was until then."""
        ledger, pid = self._ledger, event.pid
        if event.mask & OPEN_EXEC_PERM and pid in self._judged and pid in ledger.perhaps:
            facts = ledger.facts.get(pid) or facts_of(pid)
            led = _ENDED if facts is None else self._imported(pid, facts)
            if led is not None:
                ledger.led.setdefault(pid, led)
        ledger.note(event)
        self._hold_opens()

    def _hold_opens(self) -> None:
        if not self.lost:
            self._holds.opens(bool(self._ledger.leaving))

    def _inside(self, event: Event) -> bool:
        """Return whether an open in the directory itself may go on."""
        if event.pid == os.getpid():
            return True
        name = posixpath.basename(path_of(event.fd))
        if self.command.is_outsider(event.pid):
            self.command.wait_until_admitted()
        if self._sealed or self.command.is_outsider(event.pid):
            self._refuse(event.pid, name, b"")
            return False
        if not self.lost:
            self._holds.executions()
        facts = facts_of(event.pid)
        why = self._why(event.pid, facts)
        if why is None and facts is not None:
            self._writes.opened(os.fstat(event.fd).st_ino, name)
            self._judged[event.pid] = facts.started
            self._ledger.keep(event.pid, facts)
            return True
        if name not in self._names:
            return True
        self._refuse(event.pid, name, why or _ENDED)
        return False

    def _note_change(self, change: Change) -> None:
        if self._spoils(change.pid):
            by_outsider = self.command.is_outsider(change.pid)
            self._writes.spoiled(change.inode, by_outsider=by_outsider)
        elif change.mask & MODIFY:
            self._writes.written(change.inode)

    def _spoils(self, pid: int) -> bool:
        """Whether what a process writes is not to be vouched for."""
        ledger = self._ledger
        if pid not in self._judged or started_of(pid) not in {None, self._judged[pid]}:
            return self._why(pid, facts_of(pid)) is not None
        if pid in ledger.led or pid in ledger.read_by_shell:
            return True
        if pid not in ledger.perhaps:
            return False
        facts = ledger.facts.get(pid) or facts_of(pid)
        return facts is None or self._imported(pid, facts) is not None

    def _imported(self, pid: int, facts: Facts) -> bytes | None:
        sources = self._ledger.perhaps.get(pid)
        if sources is None:
            return None
        return may_have_imported(facts, sources, self._root, self._id_base)

    def _why(self, pid: int, facts: Facts | None) -> bytes | None:
        """Return what foreign thing leads a process; None: nothing."""
        ledger = self._ledger
        led = ledger.led.get(pid) or ledger.read_by_shell.get(pid)
        if led is None:
            led = _ENDED if facts is None else self._imported(pid, facts)
        if led is not None or facts is None:
            return led
        if facts.program.startswith(("/memfd:", "/dev/shm/")):
            return os.fsencode(facts.program)
        self.command.wait_until_admitted()
        top, seen = self.command.pid, 0
        try:
            while pid != top and seen < 1000:
                pid, seen = parent_of(pid), seen + 1
                if pid in {0, 1, self._init_pid}:
                    return b"something whose parent has ended"
                # What it was given to do, and by what, came from a process like this.
                above = ledger.led.get(pid) or ledger.read_by_shell.get(pid)
                if above is None and pid != top:
                    above = ledger.touched.get(pid)
                if above is not None:
                    return above
        except OSError:
            return _ENDED
        return None

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
            flags = os.O_PATH | os.O_NOFOLLOW
            fd = syscalls.openat2(self.mount, name, flags, resolve=syscalls.RESOLVE_BENEATH)
        except OSError:
            return None
        with closing(fd):
            status = os.fstat(fd)
            content = b""
            if stat.S_ISREG(status.st_mode):
                with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:  # noqa: PTH123
                    content = file.read(MOST_CONTENT) or b""
            vouched = self._writes.vouched(status.st_ino) and not self.lost
            return Kept(
                *(name, status.st_ino, status.st_mode, status.st_size, status.st_nlink),
                vouched,
                content,
            )
