"""Drive the native spawner: start its workers, route requests to them, end them.

One `Spawner` runs a few workers (native/), each a process in a session of its own behind one
socketpair. A sandbox belongs to the worker that made it. Everything here belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TypeVar

from coldframe.host import answers, wire
from coldframe.host.descriptors import close_all, needing_room
from coldframe.host.link import Field, Link
from coldframe.host.outcome import Outcome
from coldframe.host.spawner_types import (
    Argument,
    Created,
    CreateSpec,
    ExecEnd,
    ExecSpec,
    Leftover,
    OutputSpools,
    Place,
    Process,
    Progress,
    SandboxGone,
    SpawnerConfig,
    SpawnerFault,
    Started,
    StreamEnd,
    WorkerStat,
)
from coldframe.host.wire import Fields, Scope, Tag, Type
from coldframe.protocol.errors import CapabilityError, CapacityError, SpawnerLostError

__all__ = [
    "CreateSpec",
    "Created",
    "ExecEnd",
    "ExecSpec",
    "Execution",
    "Leftover",
    "OutputSpools",
    "Place",
    "Process",
    "Progress",
    "SandboxGone",
    "Spawner",
    "SpawnerConfig",
    "SpawnerFault",
    "Started",
    "StreamEnd",
    "WorkerStat",
]

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 60.0
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(slots=True)
class Execution:
    """A command that was asked for: its number, and its answers to come."""

    sandbox_id: str
    exec_id: int
    ended: Outcome[ExecEnd]
    """Raises SpawnerFault (not executed), SpawnerLostError, or CapacityError: it was executed,
    and what came back found no room in this process."""
    started: Outcome[Started] | None
    """Only with `want_started`; raises the same."""
    _worker: _Worker = field(repr=False)


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    link: Link
    lost: bool = False
    features: tuple[str, ...] = ()


class Spawner:
    """The workers of one node.

    Args:
        config: what the workers are told.
        gone: called when a sandbox ends without having been destroyed.
        lost: called when a worker died; its sandboxes die with it. Gets their ids.
    """

    def __init__(
        self,
        config: SpawnerConfig,
        *,
        gone: Callable[[SandboxGone], None],
        lost: Callable[[Sequence[str]], None],
    ) -> None:
        self._config, self._gone, self._lost = config, gone, lost
        self._workers: list[_Worker] = []
        self._of: dict[str, _Worker] = {}
        # Apart: by one counter, what goes with each create would send all creates to one worker.
        self._turn_to_make = itertools.count()
        self._turn_to_help = itertools.count()
        self._next_exec = 1
        self._closing = False
        self.program_sha256 = ""
        """Hex digest of the native program that runs, known once started."""

    # --- life ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers.

        Raises:
            CapabilityError: there is no native program, or the kernel refuses what it needs.
        """
        program, self.program_sha256 = _sealed_program(self._config.binary)
        init, _ = _sealed_program(self._config.init_binary or self._config.binary)
        client = os.pidfd_open(os.getpid())
        directories = [
            os.open(path, os.O_DIRECTORY | os.O_CLOEXEC)
            for path in (self._config.layers, self._config.spool)
        ]
        try:
            for _ in range(self._config.workers):
                self._workers.append(self._launch(program))
            for worker in self._workers:
                await self._greet(worker, init, client, directories)
        except BaseException:
            await self.close()
            raise
        finally:
            close_all([program, init, client, *directories])

    async def close(self, patience_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End every worker, and with it (in process) every sandbox; wait until they have gone.

        One that has not ended after `patience_s` is killed.
        """
        self._closing = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.link.close("the spawner is closed")
        await asyncio.gather(*(_reap(worker.process, patience_s) for worker in workers))

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps of CREATE at which a fault can be injected, in their order."""
        return self._features("step:")

    @property
    def limits(self) -> frozenset[str]:
        """Of cpu, memory, pids: those that this machine's cgroups enforce."""
        return frozenset(self._features("limit:"))

    @property
    def pids(self) -> tuple[int, ...]:
        """Host pids of the workers that live."""
        return tuple(worker.process.pid for worker in self._workers if not worker.lost)

    # --- sandboxes ----------------------------------------------------------------

    async def prepare(self, sandbox_id: str, id_base: int, inject: str | None = None) -> Place:
        """Make all of a sandbox that needs neither image nor limits: a blank. Return where it is.

        `create` with the same id and `id_base` goes on with it; `destroy` ends it. One that ends
        by itself is told as `gone`.

        Raises:
            SpawnerFault: a step failed (`stage` names it); nothing is left.
            SpawnerLostError: the worker died meanwhile.
        """
        fields: list[Field] = [
            (Tag.SANDBOX, sandbox_id.encode()),
            (Tag.PREPARE_NUMBERS, wire.U64.pack(id_base)),
        ]
        if inject is not None:
            fields.append((Tag.INJECT, inject.encode()))
        return await self._make(sandbox_id, Type.PREPARE, fields, answers.decode_place, [])

    async def create(self, spec: CreateSpec) -> Created:
        """Make a sandbox, from its blank if there is one.

        Raises:
            SpawnerFault: a step failed (`stage` names it); nothing is left. Stage `sandbox`: the
                id is in use, perhaps by a blank that has ended.
            SpawnerLostError: the worker died meanwhile.
            CapacityError: this process has no room for its descriptors; nothing is left.
            ValueError: the frame would be too long.
        """
        descriptors: list[int] = []
        fields = _create_fields(spec, descriptors)
        try:
            return await self._make(
                spec.sandbox_id, Type.CREATE, fields, answers.decode_created, descriptors
            )
        except CapacityError:
            # It may be there all the same, without a root that we could reach.
            with contextlib.suppress(SpawnerFault):
                await self.destroy(spec.sandbox_id)
            self._of.pop(spec.sandbox_id, None)
            raise

    async def destroy(self, sandbox_id: str) -> None:
        """End a sandbox; return when the kernel has nothing of it.

        Raises SpawnerFault (ENOENT) for one that is not known.
        """
        await self._ask_sandbox(Type.DESTROY, sandbox_id, answers.decode_nothing)
        self._of.pop(sandbox_id, None)

    async def kill_all(self, sandbox_id: str) -> int:
        """Kill everything but pid 1; return how many were killed, once they are dead."""
        return await self._ask_sandbox(Type.KILL_ALL, sandbox_id, answers.decode_count)

    async def processes(self, sandbox_id: str) -> tuple[Process, ...]:
        """Every process in a sandbox, pid 1 too."""
        return await self._ask_sandbox(Type.PROCESSES, sandbox_id, answers.decode_processes)

    async def make_socket(
        self,
        sandbox_id: str,
        family: int = socket.AF_INET,
        kind: int = socket.SOCK_STREAM,
    ) -> socket.socket:
        """A new socket in the sandbox's network namespace, non-blocking."""
        extra = (Tag.SOCKET_NUMBERS, wire.U64_PAIR.pack(family, kind))
        fd = await self._ask_sandbox(Type.SOCKET, sandbox_id, answers.decode_descriptor, extra)
        made = socket.socket(family, kind, fileno=fd)
        made.setblocking(False)
        return made

    # --- execs --------------------------------------------------------------------

    def exec(self, spec: ExecSpec) -> Execution:
        """Ask for a command; its outcomes tell the rest. Returns when the request is under way.

        Errors before execve fail `ended` with SpawnerFault: `stage` is `cwd`, `user`, `program`
        (ENOENT, EACCES, ENOEXEC, E2BIG, ...), or another step of ours.

        Raises:
            SpawnerFault: the sandbox is not known (ENOENT).
            SpawnerLostError: its worker is gone.
            ValueError: the request is longer than a frame, or holds a NUL.
        """
        worker = self._worker_of(spec.sandbox_id)
        exec_id = self._next_exec
        self._next_exec += 1
        ended: Outcome[ExecEnd] = Outcome()
        started: Outcome[Started] | None = Outcome() if spec.want_started else None
        descriptors: list[int] = []
        fields = _exec_fields(spec, exec_id, descriptors)
        waiter = answers.ExecAnswer(ended, started)
        self._send(worker, Type.EXEC, fields, waiter, descriptors)
        return Execution(spec.sandbox_id, exec_id, ended, started, worker)

    async def output(self, execution: Execution) -> OutputSpools:
        """The spool files of an exec, from now on kept up to date. ENOENT: not kept any more."""
        return await self._ask_exec(Type.EXEC_OUTPUT, execution, answers.decode_output)

    async def watch(self, execution: Execution, stdout_seen: int, stderr_seen: int) -> Progress:
        """Return when a total is past what was seen, or nothing more will come."""
        extra = (Tag.SEEN, wire.U64_PAIR.pack(stdout_seen, stderr_seen))
        return await self._ask_exec(Type.EXEC_WATCH, execution, answers.decode_progress, extra)

    async def mark(self, execution: Execution) -> Progress:
        """Read the pipes until they are empty, and tell how far the streams are."""
        return await self._ask_exec(Type.EXEC_MARK, execution, answers.decode_progress)

    async def signal(self, execution: Execution, signum: int, scope: Scope = Scope.GROUP) -> int:
        """Send a signal; return how many processes it reached (a group counts as one)."""
        extra = (Tag.SIGNAL_NUMBERS, wire.U64_PAIR.pack(signum, scope))
        return await self._ask_exec(Type.SIGNAL, execution, answers.decode_count, extra)

    async def forget(self, execution: Execution) -> None:
        """Drop the spool of an ended exec; what it left running goes on."""
        await self._ask_exec(Type.EXEC_FORGET, execution, answers.decode_nothing)

    # --- the machine --------------------------------------------------------------

    async def remove_tree(self, directory: int, name: Argument) -> int:
        """Remove `name` in a directory (descriptor, not taken over) and all below it.

        Never follows a link; returns the number of entries removed. A name that is not there
        counts 0.
        """
        fields: list[Field] = [(Tag.DIRECTORY_FD, wire.U32.pack(0)), (Tag.NAME, _bytes(name))]
        worker = self._pick(self._turn_to_help)
        return await self._ask(worker, Type.REMOVE_TREE, fields, answers.decode_count, [directory])

    async def stat(self) -> tuple[WorkerStat, ...]:
        """Counts of each worker that lives."""
        asked = [
            self._ask(worker, Type.STAT, [], answers.decode_stat)
            for worker in self._workers
            if not worker.lost
        ]
        return tuple(await asyncio.gather(*asked))

    async def measure(self, count: int, path: str = "/bin/true") -> tuple[int, ...]:
        """Durations in ns of `count` times vfork+execve+wait of a host program, by a worker."""
        fields: list[Field] = [
            (Tag.COUNT, wire.U64.pack(count)),
            (Tag.PATH, os.fsencode(path)),
        ]
        return await self._ask(
            self._pick(self._turn_to_help), Type.MEASURE, fields, answers.decode_durations
        )

    # --- inside -------------------------------------------------------------------

    def _features(self, prefix: str) -> tuple[str, ...]:
        if not self._workers:
            return ()
        found = self._workers[0].features
        return tuple(name.removeprefix(prefix) for name in found if name.startswith(prefix))

    def _launch(self, program: int) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [f"/proc/self/fd/{program}", "spawner", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(program, theirs.fileno()),
                start_new_session=True,
                cwd="/",
                env={},
            )
        worker: _Worker | None = None

        def on_event(frame_type: int, fields: Fields, descriptors: list[int]) -> None:
            close_all(descriptors)
            if frame_type == Type.SANDBOX_GONE:
                self._gone(answers.decode_gone(fields))

        def on_lost(reason: str) -> None:
            if worker is not None:
                self._on_lost(worker, reason)

        worker = _Worker(process, Link(ours, on_event, on_lost))
        return worker

    async def _greet(
        self, worker: _Worker, init: int, client: int, directories: Sequence[int]
    ) -> None:
        config = self._config
        flags = wire.HelloFlag.IN_PROCESS if config.in_process else 0
        fields: list[Field] = [
            (Tag.VERSION, wire.U64.pack(wire.VERSION)),
            (Tag.NODE_ID, config.node_id.encode()),
            (Tag.HELLO_FLAGS, wire.U64.pack(flags)),
            (Tag.LAYERS_FD, wire.U32.pack(0)),
            (Tag.SPOOL_FD, wire.U32.pack(1)),
            (Tag.SELF_FD, wire.U32.pack(2)),
        ]
        descriptors = [*directories, init]
        if config.in_process:
            # A forked child may hold our end of the socket longer than we live.
            fields.append((Tag.CLIENT_FD, wire.U32.pack(len(descriptors))))
            descriptors.append(client)
        for name, path in config.cgroups.items():
            fields.append((Tag.CGROUP, name.encode() + b"=" + os.fsencode(path)))
        try:
            worker.features = await self._ask(
                worker, Type.HELLO, fields, answers.decode_features, descriptors
            )
        except SpawnerFault as fault:
            raise CapabilityError(f"the native spawner cannot work here: {fault}") from fault
        except SpawnerLostError as lost:
            raise CapabilityError("the native spawner ended before it answered") from lost

    def _on_lost(self, worker: _Worker, reason: str) -> None:
        if worker.lost:
            return
        worker.lost = True
        worker.link.fail_all(SpawnerLostError(f"the spawner worker is gone: {reason}"))
        ids = [sandbox_id for sandbox_id, owner in self._of.items() if owner is worker]
        for sandbox_id in ids:
            del self._of[sandbox_id]
        if not self._closing:
            threading.Thread(target=worker.process.wait, daemon=True).start()
            self._lost(ids)

    def _pick(self, turn: Iterator[int]) -> _Worker:
        for _ in self._workers:
            worker = self._workers[next(turn) % len(self._workers)]
            if not worker.lost:
                return worker
        raise SpawnerLostError("no spawner worker is left")

    def _worker_of(self, sandbox_id: str) -> _Worker:
        worker = self._of.get(sandbox_id)
        if worker is None:
            raise SpawnerFault(errno.ENOENT, "sandbox", f"no sandbox {sandbox_id!r}")
        return worker

    def _send(
        self,
        worker: _Worker,
        frame_type: Type,
        fields: list[Field],
        waiter: answers.Answer[T],
        descriptors: Sequence[int] = (),
    ) -> None:
        try:
            with needing_room("the spawner was not asked"):
                worker.link.request(frame_type, fields, waiter, descriptors)
        except (BrokenPipeError, ConnectionError) as error:
            worker.link.close(str(error))
            raise SpawnerLostError(f"the spawner worker is gone: {error}") from error

    async def _ask(
        self,
        worker: _Worker,
        frame_type: Type,
        fields: list[Field],
        decode: Callable[[Fields, list[int]], T],
        descriptors: Sequence[int] = (),
    ) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._send(worker, frame_type, fields, answers.Answer(future, decode), descriptors)
        return await future

    async def _make(
        self,
        sandbox_id: str,
        frame_type: Type,
        fields: list[Field],
        decode: Callable[[Fields, list[int]], T],
        descriptors: Sequence[int],
    ) -> T:
        worker = self._of.get(sandbox_id) or self._pick(self._turn_to_make)
        self._of[sandbox_id] = worker
        try:
            return await self._ask(worker, frame_type, fields, decode, descriptors)
        except SpawnerFault as fault:
            if fault.stage != "sandbox":  # else the worker has another of this id
                self._of.pop(sandbox_id, None)
            raise
        except ValueError:
            self._of.pop(sandbox_id, None)
            raise

    async def _ask_sandbox(
        self,
        frame_type: Type,
        sandbox_id: str,
        decode: Callable[[Fields, list[int]], T],
        *extra: Field,
    ) -> T:
        worker = self._worker_of(sandbox_id)
        fields = [(Tag.SANDBOX, sandbox_id.encode()), *extra]
        return await self._ask(worker, frame_type, fields, decode)

    async def _ask_exec(
        self,
        frame_type: Type,
        execution: Execution,
        decode: Callable[[Fields, list[int]], T],
        *extra: Field,
    ) -> T:
        fields = [(Tag.EXEC_ID, wire.U64.pack(execution.exec_id)), *extra]
        return await self._ask(execution._worker, frame_type, fields, decode)


# --- requests -------------------------------------------------------------------------


def _bytes(value: Argument) -> bytes:
    encoded = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    if b"\0" in encoded:
        raise ValueError(f"{encoded[:80]!r} holds a NUL")
    return encoded


def _create_fields(spec: CreateSpec, descriptors: list[int]) -> list[Field]:
    flags = wire.CreateFlag.NO_NEW_PRIVS if spec.no_new_privs else 0
    fields: list[Field] = [
        (Tag.SANDBOX, spec.sandbox_id.encode()),
        (Tag.HOSTNAME, _bytes(spec.hostname)),
        (
            Tag.CREATE_NUMBERS,
            wire.CREATE_NUMBERS.pack(
                spec.id_base,
                spec.memory_bytes,
                spec.cpu_milli,
                spec.pids,
                spec.shm_bytes,
                spec.tmpfs_bytes,
                flags,
            ),
        ),
    ]
    fields += [(Tag.LAYER, _bytes(name)) for name in spec.layers]
    if spec.upper is not None:
        fields.append((Tag.UPPER_FD, wire.U32.pack(len(descriptors))))
        descriptors.append(spec.upper)
    if spec.inject is not None:
        fields.append((Tag.INJECT, spec.inject.encode()))
    return fields


def _exec_fields(spec: ExecSpec, exec_id: int, descriptors: list[int]) -> list[Field]:
    flags = (
        (wire.ExecFlag.NO_NEW_PRIVS if spec.no_new_privs else 0)
        | (wire.ExecFlag.MERGE_STDERR if spec.merge_stderr else 0)
        | (wire.ExecFlag.STARTED if spec.want_started else 0)
        | (wire.ExecFlag.PTY if spec.pty else 0)
        | (wire.ExecFlag.OUT_OF_REACH if spec.out_of_reach else 0)
    )
    rows, cols = spec.pty or (0, 0)
    numbers = wire.EXEC_NUMBERS.pack(
        exec_id,
        spec.uid,
        spec.gid,
        spec.umask,
        0 if spec.deadline_s is None else max(1, int(spec.deadline_s * 1e9)),
        spec.spool_bytes,
        spec.inline_bytes,
        spec.kill_bytes or 0,
        rows,
        cols,
        flags,
    )
    fields: list[Field] = [
        (Tag.SANDBOX, spec.sandbox_id.encode()),
        (Tag.EXEC_NUMBERS, numbers),
        (Tag.CWD, _bytes(spec.cwd)),
    ]
    fields += [(Tag.ARG, _bytes(value)) for value in spec.argv]
    env = spec.env.items() if isinstance(spec.env, Mapping) else spec.env
    fields += [(Tag.ENV, _bytes(name) + b"=" + _bytes(value)) for name, value in env]
    fields += [(Tag.GROUP, wire.U64.pack(group)) for group in spec.groups]
    if spec.stdin is not None:
        fields.append((Tag.STDIN_FD, wire.U32.pack(len(descriptors))))
        descriptors.append(spec.stdin)
    for number, fd in spec.extra:
        fields.append((Tag.EXTRA_FD, wire.U32_PAIR.pack(number, len(descriptors))))
        descriptors.append(fd)
    return fields


# --- processes ------------------------------------------------------------------------


def _sealed_program(binary: Path | None) -> tuple[int, str]:
    """A sealed memfd with the native program, and its digest.

    What runs cannot be written from a sandbox.
    """
    source = binary or Path(str(resources.files("coldframe") / "_native" / "coldframe-native"))
    try:
        content = source.read_bytes()
    except FileNotFoundError as error:
        raise CapabilityError(
            f"{source} is missing: build it with `make -C native` or `pip install -e .`"
        ) from error
    fd = os.memfd_create("coldframe-native", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        # Executable but not readable: then the kernel makes whatever runs from it undumpable.
        os.fchmod(fd, 0o111)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, hashlib.sha256(content).hexdigest()


async def _reap(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        await asyncio.to_thread(process.wait, timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)
