"""Tell which processes of a sandbox ran what its agent, or what it left running, has made.

Two marks follow from what a process opened. It is *touched* once it has opened a foreign file of
any kind; what it writes is foreign too. It is *led* once it has taken a foreign file for code: by
executing it, or by opening what its loader or interpreter loads: a shell whatever it reads, Python
what it imports, a tool (tar, sed, cp) everything.
A file is foreign if it was made in the sandbox's life before `since` and is not what the image has
there, or if an outsider or a touched process wrote it. Docs: adr/0045.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.host import syscalls
from coldframe.host.fanotify import (
    ACCESS,
    CLOSE_WRITE,
    MODIFY,
    OPEN,
    OPEN_EXEC,
    OPEN_EXEC_PERM,
    Birth,
    Event,
    birth,
)
from coldframe.host.process_facts import Facts, facts_of
from coldframe.host.roottree import closing

_LOADED: dict[str, frozenset[bytes]] = {
    "python": frozenset(
        (
            *(b".pyc", b".pyo", b".pth", b".pyz", b".egg", b".whl"),
            # Programs for the machine that reads them.
            *(b".pkl", b".pickle", b".dill", b".joblib", b".pt", b".ckpt"),
        )
    ),
    "node": frozenset((b".js", b".mjs", b".cjs", b".ts", b".node")),
    "perl": frozenset((b".pl", b".pm", b".t", b".ph")),
    "ruby": frozenset((b".rb",)),
    "php": frozenset((b".php", b".inc", b".phar")),
    "java": frozenset((b".jar", b".class")),
    "lua": frozenset((b".lua",)),
    "Rscript": frozenset((b".r", b".rdata", b".rds")),
    "julia": frozenset((b".jl",)),
}
"""What an interpreter takes for code, by the beginning of its name. What else it opens is data."""
_SHELLS = frozenset(("sh", "dash", "bash", "zsh", "ksh", "mksh", "ash", "busybox", "fish"))
_TOOLS = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/", "/usr/local/bin/", "/usr/local/sbin/")
"""A program from here, if no interpreter, does what its input says: unpacks, copies, edits."""
_SAME_BYTES = 64 << 20
"""Larger files that were copied up are foreign without a look."""
_PIECE = 1 << 20
_PATH = 8
"""A path is up to 4 KiB."""
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS

DATA_OF_THE_SYSTEM = (
    b"/etc/ld.so.cache",
    b"/etc/passwd",
    b"/etc/group",
    b"/etc/shadow",
    b"/etc/gshadow",
    b"/etc/hosts",
    b"/etc/hostname",
    b"/etc/host.conf",
    b"/etc/resolv.conf",
    b"/etc/nsswitch.conf",
    b"/etc/services",
    b"/etc/protocols",
    b"/etc/gai.conf",
    b"/etc/localtime",
    b"/etc/timezone",
    b"/etc/inputrc",
    b"/etc/locale.alias",
    b"/etc/ssl",
    b"/etc/ca-certificates",
    b"/etc/machine-id",
    b"/usr/lib/locale",
    b"/usr/share/locale",
    b"/usr/share/zoneinfo",
    b"/usr/share/ca-certificates",
    b"/usr/share/terminfo",
)
"""What the C library reads in every process and honest agents change (a user, a package)."""


@dataclass
class Ledger:
    """What is known of files and processes so far. Used by one thread at a time."""

    created_ns: int
    """When the sandbox was ready: what is older is the image's."""
    since_ns: int
    """What is made from then on is judged by who makes it."""
    layers: Sequence[Path]
    """Trees of the image, top first."""
    trusted: Sequence[bytes]
    """Paths whose files are never foreign."""
    is_outsider: Callable[[int], bool]
    """Whether a process is neither the watched command's nor the host's."""
    touched: dict[int, bytes] = field(default_factory=dict)
    """Process → the first foreign file that it opened."""
    led: dict[int, bytes] = field(default_factory=dict)
    read_by_shell: dict[int, bytes] = field(default_factory=dict)
    """Process → a foreign file that it read while it was a shell, until it executes another."""
    perhaps: dict[int, set[bytes]] = field(default_factory=dict)
    """Process → Python sources that it opened: to import them, or to read them as text."""
    facts: dict[int, Facts] = field(default_factory=dict)
    """Process → what it is run as; of those that `keep` was called for."""
    leaving: dict[int, Facts | None] = field(default_factory=dict)
    """Process → what it was when it last began to execute something; not known anew since."""
    _is_harmless: Callable[[bytes], bool] = field(init=False)
    _foreign: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    _seen: set[tuple[int, int, int]] = field(default_factory=set)
    _same: dict[tuple[int, int, int], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_harmless = below((*self.trusted, *DATA_OF_THE_SYSTEM))

    def size(self) -> int:
        """Return how much is remembered: so many times what a file takes of which no path is."""
        paths = len(self._foreign) + len(self.touched) + sum(map(len, self.perhaps.values()))
        return len(self._seen) + len(self._same) + _PATH * paths

    def note(self, event: Event) -> None:
        """Draw conclusions from one event on the sandbox's own file systems."""
        if event.mask & OPEN_EXEC_PERM:
            self._executes(event.pid)
            return
        if event.pid in self.leaving:
            self.keep(event.pid, facts_of(event.pid))
        file = birth(event.fd)
        if event.mask & (ACCESS | OPEN | OPEN_EXEC):
            self._opened(event, file)
        if event.mask & (MODIFY | CLOSE_WRITE) and (
            event.pid in self.touched or self.is_outsider(event.pid)
        ):
            self._foreign.setdefault(file.key, path_of(event.fd))

    def note_own(self, event: Event) -> None:
        """The host itself has opened a file: what it makes is nobody else's."""
        file = birth(event.fd)
        if file.made_ns >= self.since_ns:
            self._seen.add(file.key)

    def keep(self, pid: int, facts: Facts | None) -> None:
        """Remember what a process is run as, for when it has ended."""
        if facts is None:
            return
        if pid in self.leaving:
            before = self.leaving[pid]
            if before is None or before.image == facts.image:
                return  # it is what it is about to be no more
            del self.leaving[pid]
        self.facts[pid] = facts

    def forget(self, pid: int) -> None:
        """A process that `keep` was called for has ended, and did nothing that is not noted."""
        self.facts.pop(pid, None)
        self.leaving.pop(pid, None)

    def _executes(self, pid: int) -> None:
        """A process is held back before it becomes something else."""
        if pid in self.facts or pid in self.leaving:
            self.facts.pop(pid, None)
            self.leaving[pid] = facts_of(pid)

    def _opened(self, event: Event, file: Birth) -> None:
        if file.made_ns >= self.since_ns and file.key not in self._seen:
            # Whoever made it opened it first.
            self._seen.add(file.key)
            if self.is_outsider(event.pid):
                self._foreign[file.key] = path_of(event.fd)
            if event.pid in self.perhaps:
                self._imports(event.pid, path_of(event.fd))
        path = self._foreign_path(event.fd, file)
        if path is None:
            if event.mask & OPEN_EXEC:
                self.read_by_shell.pop(event.pid, None)
            return
        self._took(event, path)

    def _took(self, event: Event, path: bytes) -> None:
        """A process opened or read a foreign file: what is it now?"""
        pid = event.pid
        program = self.facts[pid].program if pid in self.facts else program_of(pid)
        kind = posixpath.basename(program)
        if event.mask & OPEN_EXEC or is_library(path):
            self.led.setdefault(pid, path)
        elif kind in _SHELLS:
            # What a shell opens it may be about to write; what it reads it may be about to run.
            if not event.mask & ACCESS:
                return
            self.read_by_shell.setdefault(pid, path)
        elif kind.startswith("python") and path.endswith(b".py"):
            self.perhaps.setdefault(pid, set()).add(path)
        elif takes_for_code(program, path):
            self.led.setdefault(pid, path)
        self.touched.setdefault(pid, path)

    def _imports(self, pid: int, path: bytes) -> None:
        """A process made a file: Python keeps what it imports compiled, before that runs."""
        directory, _, name = path.rpartition(b"/")
        if directory.endswith(b"/__pycache__"):
            source = directory.removesuffix(b"__pycache__") + name.partition(b".")[0] + b".py"
            if source in self.perhaps[pid]:
                self.led.setdefault(pid, source)

    def _foreign_path(self, fd: int, file: Birth) -> bytes | None:
        path = self._foreign.get(file.key)
        if path is None:
            if not self.created_ns <= file.made_ns < self.since_ns:
                return None
            path = path_of(fd)
        if self._is_harmless(path):
            return None
        if file.key not in self._foreign and self._is_the_images(fd, path, file):
            return None
        return path

    def _is_the_images(self, fd: int, path: bytes, file: Birth) -> bool:
        """Whether the image has the same content there: a changed mode makes a copy."""
        if file.key not in self._same:
            self._same[file.key] = file.size <= _SAME_BYTES and self._same_in_image(fd, path)
        return self._same[file.key]

    def _same_in_image(self, fd: int, path: bytes) -> bool:
        below = self._open_in_image(path)
        if below is None:
            return False
        with closing(below):
            return stat.S_ISREG(os.fstat(below).st_mode) and _same_content(fd, below)

    def _open_in_image(self, path: bytes) -> int | None:
        """Open what the image has at a path without links; None: nothing."""
        for layer in self.layers:
            try:
                with closing(os.open(layer, os.O_PATH | os.O_CLOEXEC)) as top:
                    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
                    return syscalls.openat2(top, path.lstrip(b"/"), flags, resolve=_BENEATH)
            except OSError:
                continue
        return None


def _same_content(one: int, other: int) -> bool:
    if os.fstat(one).st_size != os.fstat(other).st_size:
        return False
    at = 0
    while piece := os.pread(one, _PIECE, at):
        if piece != os.pread(other, _PIECE, at):
            return False
        at += len(piece)
    return True


def path_of(fd: int) -> bytes:
    """Return the path that a file had in its sandbox when it was opened, or has now."""
    return os.readlink(b"/proc/self/fd/%d" % fd)  # noqa: PTH115 - bytes


def below(tops: Sequence[bytes]) -> Callable[[bytes], bool]:
    """Return what tells whether a path is one of these, or lies in one of them."""
    exact, within = frozenset(tops), tuple(top.rstrip(b"/") + b"/" for top in tops)
    return lambda path: path in exact or path.startswith(within)


def is_library(path: bytes) -> bool:
    """Whether a file's name is that of a library for the dynamic loader, or of its list."""
    name = posixpath.basename(path)
    return name.endswith(b".so") or b".so." in name or name == b"ld.so.preload"


def takes_for_code(program: str, path: bytes) -> bool:
    """Whether a program does what a file says: an interpreter by its name, a tool always."""
    kind = posixpath.basename(program)
    for begins, suffixes in _LOADED.items():
        if kind.startswith(begins):
            return posixpath.splitext(path)[1].lower() in suffixes
    return program.startswith(_TOOLS) or not program


def program_of(pid: int) -> str:
    """Return the path of what a process runs; empty: it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 - a tenth of a Path's price
    except OSError:
        return ""


def may_have_imported(process: Facts, sources: set[bytes], root: int, id_base: int) -> bytes | None:
    """Return a source that a Python may have run without leaving a trace of it; None: none.

    A script is not kept compiled, nor is anything where that is switched off or cannot be written.
    """
    given = {posixpath.basename(one) for one in process.arguments}
    keeps_none = (
        process.user != id_base
        or b"\0PYTHONDONTWRITEBYTECODE=" in b"\0" + process.environ
        or _switched_off(process.arguments)
    )
    may_keep: dict[bytes, bool] = {}
    for source in sorted(sources):
        if keeps_none or source == process.stdin or posixpath.basename(source) in given:
            return source
        directory = posixpath.dirname(source)
        if directory not in may_keep:
            may_keep[directory] = _may_keep(root, directory)
        if not may_keep[directory]:
            return source
    return None


def _switched_off(arguments: Sequence[bytes]) -> bool:
    """Whether Python's own options hold -B."""
    for argument in arguments[1:]:
        if not argument.startswith(b"-") or argument.startswith(b"--"):
            return False
        own = argument[1:].partition(b"c")[0].partition(b"m")[0]
        if b"B" in own:
            return True
        if len(own) < len(argument) - 1:
            return False
    return False


def _may_keep(root: int, directory: bytes) -> bool:
    """Whether a directory has, or may be given, the one for what was compiled."""
    resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
    try:
        with closing(
            syscalls.openat2(root, directory + b"/__pycache__", os.O_PATH, resolve=resolve)
        ) as fd:
            return stat.S_ISDIR(os.fstat(fd).st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False
