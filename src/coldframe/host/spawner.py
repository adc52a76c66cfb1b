"""Drive the native spawner: start its workers, route requests to them, end them.

One `Spawner` runs a few workers (native/), each a process in a session of its own behind one
socketpair. A sandbox belongs to the worker that made it. Everything here belongs to one event
loop. With `SpawnerConfig.sockets` the workers outlive this process, and keep what the node asks
them to; `attach` takes such ones over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from coldframe.host import answers, execution, requests, wire, workers
from coldframe.host.descriptors import close_all
from coldframe.host.execution import Execution
from coldframe.host.spawner_types import (
    Argument,
    Created,
    CreateSpec,
    ExecEnd,
    ExecSpec,
    Keep,
    Kept,
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
from coldframe.host.wire import Field, Fields, FrameType, Tag, Type
from coldframe.host.worker import Worker
from coldframe.protocol.errors import CapacityError, SpawnerLostError

__all__ = [
    "CreateSpec",
    "Created",
    "ExecEnd",
    "ExecSpec",
    "Execution",
    "Keep",
    "Kept",
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
        self._workers: list[Worker] = []
        self._of: dict[str, Worker] = {}
        # Apart: by one counter, what goes with each create would send all creates to one worker.
        self._turn_to_make = itertools.count()
        self._turn_to_help = itertools.count()
        # Above all that those said who drove the same workers before.
        self._first = 1 if config.sockets is None else time.monotonic_ns()
        self._next_exec = self._first
        self._closing = False
        self.program_sha256 = ""
        """Hex digest of the native program that runs, known once started."""

    # --- life ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers.

        Raises:
            CapabilityError: there is no native program, or the kernel refuses what it needs.
        """
        program, self.program_sha256 = workers.sealed_program(self._config.binary)
        init, _ = workers.sealed_program(self._config.init_binary or self._config.binary)
        try:
            for _ in range(self._config.workers):
                self._workers.append(
                    workers.launch(program, self._on_event, self._on_lost, first_id=self._first)
                )
            for worker in self._workers:
                await workers.greet(worker, self._config, init)
        except BaseException:
            await self.close()
            raise
        finally:
            close_all([program, init])

    async def attach(self, socks: Sequence[socket.socket]) -> None:
        """Take over workers that have outlived their daemon, by connections to them.

        Those that are ending are left out: see `pids`.

        Raises:
            VersionMismatchError: one speaks another protocol; none was taken over.
        """
        waiting = list(socks)
        try:
            while waiting:
                sock = waiting.pop(0)
                worker = await workers.attach(
                    sock, self._on_event, self._on_lost, first_id=self._first
                )
                if worker is not None:
                    self._workers.append(worker)
        except BaseException:
            for sock in waiting:
                sock.close()
            await self.leave()
            raise

    async def leave(self) -> None:
        """Let go of workers that outlive us, once they have been told everything."""
        self._closing = True
        leaving, self._workers = self._workers, []
        for worker in leaving:
            await worker.leave()

    async def close(self, patience_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End every worker, and with it (in process) every sandbox; wait until they have gone.

        One that has not ended after `patience_s` is killed.
        """
        self._closing = True
        ending, self._workers = self._workers, []
        for worker in ending:
            if self._config.sockets is not None:
                worker.tell(Type.END, [])
                await worker.link.flush()
            worker.link.close("the spawner is closed")
        await asyncio.gather(*(worker.reap(patience_s) for worker in ending))

    @property
    def pids(self) -> tuple[int, ...]:
        """Host pids of the workers that live."""
        return tuple(worker.pid for worker in self._workers if not worker.lost)

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
        fields = requests.create_fields(spec, descriptors)
        try:
            return await self._make(
                spec.sandbox_id, Type.CREATE, fields, answers.decode_created, descriptors
            )
        except CapacityError:
            # It may be there all the same, without a root that we could reach.
            worker = self._of.get(spec.sandbox_id)
            if spec.keep is not None and worker is not None:  # else it has died since
                worker.drop(spec.sandbox_id)
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

    async def destroy_of(self, worker: Worker, sandbox_id: str) -> None:
        """As `destroy`, for one that another daemon made with this worker."""
        self._of[sandbox_id] = worker
        await self.destroy(sandbox_id)

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
        return execution.start(worker, exec_id, spec)

    # --- what outlives us -------------------------------------------------------------

    def keep(self, name: str, keep: Keep) -> None:
        """Let every worker keep something under a name, for the next daemon."""
        for worker in self._workers:
            worker.keep(name, keep)

    def worker_of(self, sandbox_id: str) -> Worker | None:
        """The worker that a sandbox belongs to."""
        return self._of.get(sandbox_id)

    async def kept(self) -> list[tuple[Worker, Kept]]:
        """Return all that the workers have kept, of each the oldest first."""
        found: list[tuple[Worker, Kept]] = []
        for worker in list(self._workers):
            fields: list[Field] = [(Tag.AFTER, wire.U64.pack(0))]
            while page := await worker.ask(Type.KEPT_LIST, fields, answers.decode_kept):
                found += [(worker, kept) for kept in page]
                fields = [(Tag.AFTER, wire.U64.pack(page[-1].serial))]
        return found

    async def await_sandbox(self, worker: Worker, sandbox_id: str) -> Created:
        """Reach a sandbox that another daemon made, or was making. Raises as `create`."""
        self._of[sandbox_id] = worker
        fields: list[Field] = [(Tag.KEPT, sandbox_id.encode())]
        return await worker.ask(Type.AWAIT, fields, answers.decode_created)

    # --- the machine --------------------------------------------------------------

    async def remove_tree(self, directory: int, name: Argument) -> int:
        """Remove `name` in a directory (descriptor, not taken over) and all below it.

        Never follows a link; returns the number of entries removed. A name that is not there
        counts 0.
        """
        fields: list[Field] = [
            (Tag.DIRECTORY_FD, wire.U32.pack(0)),
            (Tag.NAME, requests.to_bytes(name)),
        ]
        worker = self._pick(self._turn_to_help)
        return await worker.ask(Type.REMOVE_TREE, fields, answers.decode_count, [directory])

    async def stat(self) -> tuple[WorkerStat, ...]:
        """Counts of each worker that lives."""
        asked = [
            worker.ask(Type.STAT, [], answers.decode_stat)
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
        worker = self._pick(self._turn_to_help)
        return await worker.ask(Type.MEASURE, fields, answers.decode_durations)

    # --- inside -------------------------------------------------------------------

    def _on_event(self, frame_type: int, fields: Fields, descriptors: list[int]) -> None:
        close_all(descriptors)
        if frame_type == Type.SANDBOX_GONE:
            self._gone(answers.decode_gone(fields))

    def _on_lost(self, worker: Worker, reason: str) -> None:
        if worker.lost:
            return
        worker.lost = True
        worker.link.fail_all(SpawnerLostError(f"the spawner worker is gone: {reason}"))
        ids = [sandbox_id for sandbox_id, owner in self._of.items() if owner is worker]
        for sandbox_id in ids:
            del self._of[sandbox_id]
        if not self._closing:
            threading.Thread(target=worker.wait, daemon=True).start()
            self._lost(ids)

    def _pick(self, turn: Iterator[int]) -> Worker:
        for _ in self._workers:
            worker = self._workers[next(turn) % len(self._workers)]
            if not worker.lost:
                return worker
        raise SpawnerLostError("no spawner worker is left")

    def _worker_of(self, sandbox_id: str) -> Worker:
        worker = self._of.get(sandbox_id)
        if worker is None:
            raise SpawnerFault(errno.ENOENT, "sandbox", f"no sandbox {sandbox_id!r}")
        return worker

    async def _make(
        self,
        sandbox_id: str,
        frame_type: FrameType,
        fields: list[Field],
        decode: Callable[[Fields, list[int]], T],
        descriptors: Sequence[int],
    ) -> T:
        worker = self._of.get(sandbox_id) or self._pick(self._turn_to_make)
        self._of[sandbox_id] = worker
        try:
            return await worker.ask(frame_type, fields, decode, descriptors)
        except SpawnerFault as fault:
            if fault.stage != "sandbox":  # else the worker has another of this id
                self._of.pop(sandbox_id, None)
            raise
        except ValueError:
            self._of.pop(sandbox_id, None)
            raise

    async def _ask_sandbox(
        self,
        frame_type: FrameType,
        sandbox_id: str,
        decode: Callable[[Fields, list[int]], T],
        *extra: Field,
    ) -> T:
        worker = self._worker_of(sandbox_id)
        fields = [(Tag.SANDBOX, sandbox_id.encode()), *extra]
        return await worker.ask(frame_type, fields, decode)
