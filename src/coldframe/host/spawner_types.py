"""What a spawner is asked for and what comes back. Values only.

Sizes are bytes; `_ns`, `_us` and `_s` say nano-, micro- and seconds.
"""

from __future__ import annotations

import errno as errno_codes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from coldframe.host import wire

Argument = str | bytes


# --- what is asked --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpawnerConfig:
    """What every worker is told once."""

    layers: Path
    """Directory that all layer names are relative to; on a file system that can be idmapped."""
    spool: Path
    """Directory on the file system that holds spools (O_TMPFILE); nothing is named in it."""
    cgroups: Mapping[str, Path]
    """Existing directory per hierarchy under which each sandbox gets one of its own.

    `unified` is required. `memory`, `cpu`, `pids` name v1 hierarchies; without them the
    unified one is used if it has these controllers, else that limit is refused.
    """
    workers: int = 2
    sockets: Path | None = None
    """Where each worker has a socket by which the next daemon finds it: it outlives this one.

    None: a worker ends everything it started when its connection ends.
    """
    grace_s: float = 86400.0
    """How long one that outlived its daemon waits for the next before it ends everything."""
    binary: Path | None = None
    """The native program; None: the one that the package carries."""
    init_binary: Path | None = None
    """What pid 1 of each sandbox runs; None: the same. Static: an image may have no libc.

    For a worker that is built with sanitizers, which cannot be static.
    """


@dataclass(frozen=True, slots=True)
class Keep:
    """What a worker is to keep for the next daemon with a sandbox, a command, or by a name."""

    note: bytes | None
    """At most 256 KiB; nothing but the node looks into it. None: what is kept stays."""
    descriptors: Sequence[int] | None = None
    """At most 6. Not taken over. None: what is kept stays."""
    expires_at: float | None = None
    """Unix seconds at which a worker without a daemon ends the sandbox or command."""


@dataclass(frozen=True, slots=True)
class CreateSpec:
    """One sandbox. Sizes in bytes; a limit of 0 is none."""

    sandbox_id: str
    layers: Sequence[str]
    """Paths relative to the layers directory, top first, such as `DIGEST/root`."""
    id_base: int
    """Host id that stands for 0 inside; 65536 ids from there must be free."""
    hostname: str
    upper: int | None = None
    """Descriptor of the directory that holds (or will hold) `upper` and `work`. Not taken over.

    None: a tmpfs of `tmpfs_bytes`.
    """
    memory_bytes: int = 0
    cpu_milli: int = 0
    """Thousandths of one CPU."""
    pids: int = 0
    shm_bytes: int = 64 << 20
    tmpfs_bytes: int = 0
    no_new_privs: bool = False
    keep: Keep | None = None
    inject: str | None = None
    """Name of the step that fails with EIO (`coldframe-native --steps`); tests only."""


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """One command. Descriptors are not taken over; they were copied when `exec` returns."""

    sandbox_id: str
    argv: Sequence[Argument]
    env: Sequence[Argument] = ()
    """`NAME=value` each."""
    cwd: Argument = "/"
    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    umask: int = 0o022
    deadline_s: float | None = None
    spool_bytes: int = 64 << 20
    """Bytes kept per stream; at least 8192."""
    inline_bytes: int = 64 << 10
    """A stream of at most this many bytes comes back in the answer itself."""
    kill_bytes: int | None = None
    """Either stream growing past this ends the command."""
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal that is stdin, stdout and stderr.

    Its master comes with `Started`, for input and resizing only: the worker reads the output,
    which counts as stdout.
    """
    stdin: int | None = None
    """Descriptor that the command reads; None: /dev/null."""
    status: int | None = None
    """Descriptor that the command has as its number 3."""
    merge_stderr: bool = False
    want_started: bool = False
    out_of_reach: bool = False
    """No other command of the sandbox can trace it or reach its memory and files by /proc."""
    keep: Keep | None = None
    keep_stdin: int | None = None
    """The writing end of its stdin, to be kept until `Spawner.drop_stdin`."""


# --- what comes back ------------------------------------------------------------------


class Place(NamedTuple):
    """A process of a sandbox and the number of its network namespace."""

    pid: int
    """On the host."""
    network: int


@dataclass(frozen=True, slots=True)
class Created:
    """A sandbox that is ready for exec. The two descriptors belong to the receiver."""

    sandbox_id: str
    pid: int
    """Host pid of its pid 1."""
    root_fd: int
    """O_PATH descriptor of its root, in its mount namespace."""
    pidfd: int
    namespaces: Mapping[str, int]
    """Inode number by kind: user, mnt, pid, net, ipc, uts, cgroup."""

    @property
    def place(self) -> Place:
        """Where its network is."""
        return Place(self.pid, self.namespaces["net"])


@dataclass(frozen=True, slots=True)
class Started:
    """A command that has been executed."""

    host_pid: int
    pid: int
    """Its pid in the sandbox."""
    pty_fd: int | None = None
    """Master side of its terminal; belongs to the receiver."""


class StreamEnd(NamedTuple):
    """One stream at the end of the command."""

    total: int
    sha256: bytes
    """Digest of all `total` bytes, 32 bytes long."""
    data: bytes | None
    """The whole stream, or None when it lies in the spool."""
    spool_fd: int | None
    """Belongs to the receiver. Layout: `wire.spool_pieces`."""
    spool_errno: int = 0
    """Not 0: the spool could not be written (ENOSPC, ...) and less than the window is kept.

    Total and digest are of the whole all the same.
    """


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of the exec that lives on."""

    pid: int
    """In the sandbox."""
    name: bytes


class ExecEnd(NamedTuple):
    """How a command ended."""

    signalled: bool
    code: int
    """Exit code, or the signal's number."""
    reason: wire.Reason
    started_ns: int
    """CLOCK_REALTIME."""
    ended_ns: int
    duration_ns: int
    """CLOCK_MONOTONIC."""
    user_us: int
    system_us: int
    memory_peak_bytes: int
    read_bytes: int
    write_bytes: int
    oom_kills: int
    stdout: StreamEnd
    stderr: StreamEnd
    leftovers: tuple[Leftover, ...]

    @property
    def spooled(self) -> bool:
        """Whether a stream came as a spool, not whole."""
        return self.stdout.spool_fd is not None or self.stderr.spool_fd is not None

    def close(self) -> None:
        """Close the spool descriptors that nobody took."""
        for stream in (self.stdout, self.stderr):
            if stream.spool_fd is not None:
                os.close(stream.spool_fd)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the streams of an exec are."""

    stdout_total: int
    stderr_total: int
    stdout_eof: bool
    stderr_eof: bool
    ended: bool
    spool_bytes: int


@dataclass(frozen=True, slots=True)
class OutputSpools:
    """The spool files of a running or kept exec; descriptors belong to the receiver."""

    stdout_fd: int
    stderr_fd: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Process:
    """A process in a sandbox; `name` is hostile."""

    pid: int
    host_pid: int
    exec_id: int
    """0 for pid 1."""
    name: bytes


@dataclass(frozen=True, slots=True)
class SandboxGone:
    """Event: pid 1 of a sandbox ended without DESTROY. Its execs have ended already."""

    sandbox_id: str
    cause: wire.GoneCause
    code: int
    """Signal's number or exit code."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a worker has kept. The descriptors belong to the receiver."""

    name: str
    serial: int
    state: wire.KeptState
    cause: int
    """Of a sandbox that is gone: a `wire.GoneCause`, and its code."""
    code: int
    ended_at: float
    """Of a command that has ended: Unix seconds."""
    note: bytes
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerStat:
    """Counts of one worker."""

    pid: int
    sandboxes: int
    execs: int


class SpawnerFault(Exception):
    """A request failed in the kernel or was refused."""

    def __init__(self, errno: int, stage: str, message: str) -> None:
        self.errno, self.stage, self.message = errno, stage, message
        name = errno_codes.errorcode.get(errno, str(errno))
        super().__init__(f"{stage}: {name}: {message or os.strerror(errno)}")
