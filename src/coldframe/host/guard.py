"""A directory of a sandbox that one command alone may write, and only by what nobody planted.

A small file system of its own is mounted there (`guard_mount`), and every open of a file in it is
held back until it is judged (`guard_judge`): whoever is not of that command (`guard_command`) is
refused; whoever of it has run foreign code (`provenance`) may write its own logs there, but no
file that is vouched for (`guard_writes`). What a file holds is read through the mount itself, by no
path.

A thread judges, in rounds, and waits for nobody; it lives as long as the guard. When it cannot go
on, nothing is held back any more, and nothing is vouched for. Why no open waits for ever: adr/0045.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coldframe.host import fanotify, forks, syscalls
from coldframe.host.fanotify import OPEN_EXEC_PERM, OPEN_PERM, Change, Event
from coldframe.host.guard_holds import Holds
from coldframe.host.guard_judge import Judge, name_of
from coldframe.host.roottree import closing

MOST_CONTENT = (64 << 10) + 1
MOST_AHEAD = 10_000
"""Events; where more wait every open is held back, so that no more come than are judged."""
MOST_WAITING = 500_000
"""Events; the kernel holds about 200 bytes of each."""
MOST_POSTPONED = 256
"""Opens, of which each holds a descriptor of ours."""
_PATIENCE_S = 60.0
"""For the thread to do what it was asked; a round takes a second at most."""
Watched = tuple[int, fanotify.Listener, fanotify.ChangeListener, Holds]
"""A mount's descriptor, who holds back opens in it and tells of those in the rest of the sandbox,
who tells of changes in it, and what is held back in the rest."""


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

    def __init__(self, watched: Watched, judge: Judge) -> None:
        """Tell `judge` of what is `watched`; both are taken over."""
        self.mount, self._listener, self._changes, self._holds = watched
        self.judge = judge
        self._device = os.fstat(self.mount).st_dev
        self.lost = False
        """More was opened than could be judged."""
        self._postponed: list[Event] = []
        """Opens in the directory from before it was known which process is the command."""
        self._crowded = self._sealed = self._closed = False
        self._news = threading.Condition()
        self._asked = self._noted = 0
        """Reports that were asked for, and how many of them may be given."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="coldframe-guard", daemon=True)

    def start(self) -> None:
        """Begin to judge. Raises OSError: nothing can be held back."""
        forks.own(self)
        self._hold_opens()
        self._thread.start()

    def admit(self, host_pid: int) -> None:
        """Say which process is the command's first."""
        self.judge.command.admit(host_pid)
        os.eventfd_write(self._wake, 1)

    def report(self) -> list[Kept]:
        """Let nobody write any more, and return the named files; none, if `lost`."""
        self._sealed = True
        with self._news:
            self._asked += 1
            mine = self._asked
            os.eventfd_write(self._wake, 1)
            self.lost |= not self._news.wait_for(lambda: self._noted >= mine, _PATIENCE_S)
        if self.lost:
            return []
        return [kept for name in sorted(self.judge.names) if (kept := self._look(name)) is not None]

    def displaced(self, kept: Sequence[Kept]) -> list[bytes]:
        """Return which named files the command wrote and are not there any more, or not so."""
        there = {one.name: one.inode for one in kept}
        return [name for name in self.judge.writes.displaced(there) if name in self.judge.names]

    def close(self, gone: Callable[[], None]) -> None:
        """Stop judging and give everything back, but for the mount inside.

        `gone` is called by another thread once the kernel has let go of it: that takes 20 ms each
        of the two that it keeps, and nobody needs to wait but who wants to guard one more.
        """
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_S)
        self._close_descriptors()

        def let_go() -> None:
            self._close_listeners()
            gone()

        threading.Thread(target=let_go, name="coldframe-guard-end", daemon=True).start()

    def abandon(self) -> None:
        """See `forks.Owner`."""
        self._close_listeners()
        self._close_descriptors()

    def _close_listeners(self) -> None:
        self._listener.close()
        self._changes.close()

    def _close_descriptors(self) -> None:
        for fd in (self.mount, self._wake):
            if fd >= 0:
                os.close(fd)
        self.mount = self._wake = -1
        while self._postponed:
            os.close(self._postponed.pop().fd)
        self._holds.close()
        self.judge.close()

    # --- judging ----------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._listener.fd, self._changes.fd, self._wake):
            poll.register(fd, select.POLLIN)
        try:
            while not self._closed:
                poll.poll()
                if not self._closed:
                    self._round()
        except BaseException:
            self.lost = True
            self._close_listeners()  # which lets everything pass that is held back
            raise
        finally:
            with self._news:
                self._noted = 1 << 62
                self._news.notify_all()

    def _round(self) -> None:
        """Judge what waits now and no more, so that what comes without end keeps no report back."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        asked, ended = self._asked, self.judge.ended()
        # First, so that all that led a process before it changed something is known then.
        changes = self._take_changes()
        waiting = self._listener.backlog()
        self._crowded = waiting > MOST_AHEAD
        self._bound(max(waiting, self.judge.ledger.size()))
        for _ in range(waiting):
            self._take()
        self._take_up()
        for change in changes:
            self.judge.note_change(change)
        self.judge.forget(ended)
        self._hold_opens()
        with self._news:
            self._noted = asked
            self._news.notify_all()

    def _bound(self, held: int) -> None:
        if held > MOST_WAITING:
            self._lose()

    def _lose(self) -> None:
        """Hold nothing back any more, and vouch for nothing."""
        if not self.lost:
            self.lost = True
            self._listener.unwatch(self.mount)
            self._changes.unwatch(self.mount)
            self._holds.close()

    def _take_changes(self) -> list[Change]:
        waiting = self._changes.backlog()
        self._bound(waiting)
        try:
            changes = self._changes.changes(waiting)
        except OSError:  # no descriptor left to see what was changed
            self._lose()
            return []
        if not all(one.inode for one in changes):
            self._lose()
        return [one for one in changes if one.inode]

    def _take_up(self) -> None:
        """Judge what was postponed, once that can be done."""
        if not self._too_early():
            while self._postponed:
                self._handle(self._postponed.pop(0))

    def _take(self) -> None:
        try:
            event = self._listener.take()
        except OSError:  # no descriptor left for it
            self._lose()
            return
        if event is None:
            return
        if event.fd < 0:
            self._lose()
        elif self._too_early() and self._is_inside(event):
            self._postpone(event)
        else:
            self._handle(event)

    def _too_early(self) -> bool:
        """Whether nobody can say yet who is of the command."""
        return not (self.judge.command.pid or self._sealed or self.lost)

    def _postpone(self, event: Event) -> None:
        if len(self._postponed) < MOST_POSTPONED:
            self._postponed.append(event)
        else:
            self._lose()
            self._handle(event)

    def _is_inside(self, event: Event) -> bool:
        """Whether somebody else than us opened a file in the directory."""
        return event.pid != os.getpid() and os.fstat(event.fd).st_dev == self._device

    def _handle(self, event: Event) -> None:
        """Draw conclusions from an open, and answer it if it is held back."""
        held, allow = bool(event.mask & (OPEN_PERM | OPEN_EXEC_PERM)), True
        try:
            if self._is_inside(event):
                allow = False
                allow = self._admits(event)
            elif not self.lost:
                self._note(event)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended under our eyes
        except OSError:
            self._lose()
        finally:
            if held:
                self._listener.answer(event, allow=allow)
            os.close(event.fd)

    def _admits(self, event: Event) -> bool:
        """Return whether somebody may open a file in the directory."""
        if self._sealed or self.lost:
            self.judge.refuse(event.pid, name_of(event))
            return False
        if not self.judge.command.is_outsider(event.pid):
            self._holds.executions()
        return self.judge.admits(event)

    def _note(self, event: Event) -> None:
        if event.pid != os.getpid():
            self.judge.follow(event)
            self._hold_opens()
        elif not event.mask & OPEN_PERM:  # which it is in the directory
            self.judge.ledger.note_own(event)

    def _hold_opens(self) -> None:
        judge = self.judge
        self._holds.opens(self._crowded or bool(judge.command.others or judge.ledger.leaving))

    # --- telling ----------------------------------------------------------------------

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
            return Kept(
                *(name, status.st_ino, status.st_mode, status.st_size, status.st_nlink),
                self.judge.writes.vouched(status.st_ino),
                content,
            )
