"""Judge who may open a file in a guarded directory, and whose changes there are vouched for."""

from __future__ import annotations

import os
import posixpath
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from coldframe.host.fanotify import MODIFY, OPEN_EXEC_PERM, OPEN_PERM, Change, Event
from coldframe.host.guard_command import GuardedCommand
from coldframe.host.guard_writes import Writes
from coldframe.host.process_facts import Facts, facts_of, parent_of, started_of
from coldframe.host.provenance import Ledger, may_have_imported, path_of

MOST_REFUSALS = 100
"""That are told of outsiders, and as many of the command's own processes: whoever knocks without
end must not hide what else was refused."""
_MOST_PARENTS = 1000
_ENDED = b"something that has ended"


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


class Judge:
    """Of one guarded directory. Used by one thread at a time; waits for nobody."""

    def __init__(
        self,
        command: GuardedCommand,
        ledger: Ledger,
        names: frozenset[bytes],
        *,
        root: int,
        id_base: int,
        init_pid: int,
    ) -> None:
        """Judge for a command.

        Args:
            ledger: what is known of the rest of the sandbox.
            names: files that are vouched for.
            root: O_PATH descriptor of the sandbox's root; taken over.
            id_base, init_pid: first host id of the sandbox, and its pid 1 on the host.
        """
        self.command, self.ledger, self.names = command, ledger, names
        self._root, self._id_base, self._init_pid = root, id_base, init_pid
        self.writes = Writes()
        self.refused: list[Refused] = []
        """Once for each process and name."""
        self._knocked: set[tuple[int, bytes]] = set()
        self._refusals: Counter[bool] = Counter()
        """How many are told: of outsiders, and of others."""
        self._judged: dict[int, str] = {}
        """Process that was found good when it opened a file there → when it started."""

    def close(self) -> None:
        """Twice is fine."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def touched(self) -> bytes | None:
        """Return a foreign file that some process of the command has opened; None: none did."""
        return next(iter(list(self.ledger.touched.values())), None)

    # --- what processes are -----------------------------------------------------------

    def follow(self, event: Event) -> None:
        """Know what a process has become that is remembered, and what it was until then."""
        ledger, pid = self.ledger, event.pid
        if event.mask & OPEN_PERM:
            self.command.is_outsider(pid)  # it lives now, and may have ended when it is asked for
        if event.mask & OPEN_EXEC_PERM and pid in self._judged and pid in ledger.perhaps:
            facts = ledger.facts.get(pid) or facts_of(pid)
            led = _ENDED if facts is None else self._imported(pid, facts)
            if led is not None:
                ledger.led.setdefault(pid, led)
        ledger.note(event)

    def ended(self) -> dict[int, str]:
        """Return who is remembered and has ended by now, and when it had started."""
        return {pid: one for pid, one in self._judged.items() if started_of(pid) != one}

    def forget(self, ended: dict[int, str]) -> None:
        """All that they did is noted; whatever comes now is of other processes with their pids."""
        for pid, started in ended.items():
            if self._judged[pid] == started:
                del self._judged[pid]
                self.ledger.forget(pid)

    # --- opens ------------------------------------------------------------------------

    def admits(self, event: Event) -> bool:
        """Return whether an open in the directory may go on; the command has been admitted.

        Raises:
            ProcessLookupError, FileNotFoundError: who asks has ended.
        """
        name = name_of(event)
        if self.command.is_outsider(event.pid):
            self.refuse(event.pid, name)
            return False
        facts = facts_of(event.pid)
        why = self._why(event.pid, facts)
        if why is None and facts is not None:
            self.writes.opened(os.fstat(event.fd).st_ino, name)
            self._judged[event.pid] = facts.started
            self.ledger.keep(event.pid, facts)
            return True
        if name not in self.names:
            return True
        self.refuse(event.pid, name, why or _ENDED)
        return False

    def refuse(self, pid: int, name: bytes, cause: bytes = b"") -> None:
        """Remember that an open was refused, to an outsider or for a `cause`."""
        outsider = not cause
        if (pid, name) in self._knocked or self._refusals[outsider] >= MOST_REFUSALS:
            return
        self._knocked.add((pid, name))
        self._refusals[outsider] += 1
        try:
            program = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        except OSError:
            program = "?"
        self.refused.append(Refused(time.time(), program, name, outsider, cause))

    # --- changes ----------------------------------------------------------------------

    def note_change(self, change: Change) -> None:
        """A file in the directory was changed."""
        if self._spoils(change.pid):
            by_outsider = self.command.is_outsider(change.pid)
            self.writes.spoiled(change.inode, by_outsider=by_outsider)
        elif change.mask & MODIFY:
            self.writes.written(change.inode)

    def _spoils(self, pid: int) -> bool:
        """Whether what a process writes is not to be vouched for."""
        ledger = self.ledger
        if pid not in self._judged or started_of(pid) not in {None, self._judged[pid]}:
            return self._why(pid, facts_of(pid)) is not None
        if pid in ledger.led or pid in ledger.read_by_shell:
            return True
        if pid not in ledger.perhaps:
            return False
        facts = ledger.facts.get(pid) or facts_of(pid)
        return facts is None or self._imported(pid, facts) is not None

    # --- what leads a process ---------------------------------------------------------

    def _why(self, pid: int, facts: Facts | None) -> bytes | None:
        """Return what foreign thing leads a process; None: nothing."""
        ledger = self.ledger
        led = ledger.led.get(pid) or ledger.read_by_shell.get(pid)
        if led is None:
            led = _ENDED if facts is None else self._imported(pid, facts)
        if led is not None or facts is None:
            return led
        if facts.program.startswith(("/memfd:", "/dev/shm/")):
            return os.fsencode(facts.program)
        return self._led_from_above(pid)

    def _led_from_above(self, pid: int) -> bytes | None:
        """What a process was given to do, and by what, came from its parents."""
        ledger, top = self.ledger, self.command.pid
        try:
            for _ in range(_MOST_PARENTS):
                if pid == top:
                    return None
                pid = parent_of(pid)
                if pid in {0, 1, self._init_pid}:
                    return b"something whose parent has ended"
                above = ledger.led.get(pid) or ledger.read_by_shell.get(pid)
                if above is None and pid != top:
                    above = ledger.touched.get(pid)
                if above is not None:
                    return above
        except OSError:
            return _ENDED
        return b"more parents than are looked at"

    def _imported(self, pid: int, facts: Facts) -> bytes | None:
        sources = self.ledger.perhaps.get(pid)
        if sources is None:
            return None
        return may_have_imported(facts, sources, self._root, self._id_base)


def name_of(event: Event) -> bytes:
    """Return the name of a file in the directory."""
    return posixpath.basename(path_of(event.fd))
