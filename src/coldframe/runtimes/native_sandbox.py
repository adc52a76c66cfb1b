"""One sandbox of the native runtime."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coldframe.host import forks, processes
from coldframe.host.descriptors import needing_room
from coldframe.host.egress.listeners import LISTENERS
from coldframe.host.export import export_layer
from coldframe.host.fsthreads import run_to_its_end
from coldframe.host.patience import Patience
from coldframe.host.pipes import CommandPipes
from coldframe.host.rootfs import RootFiles
from coldframe.host.roottree import closing
from coldframe.host.spawner import Created, Keep, Process, Spawner, SpawnerFault
from coldframe.host.storage import Storage
from coldframe.host.treewalk import DIRECTORY
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    PortUnreachableError,
    SandboxGoneError,
    SpawnerLostError,
)
from coldframe.protocol.models import (
    ExecRequest,
    FileChanges,
    GuardReport,
    GuardRequest,
    ProcessInfo,
    SandboxSpec,
    SignalScope,
)
from coldframe.protocol.network import EgressEvent, EgressEvents, NetworkPolicy
from coldframe.runtimes.base import FileAccess, Gone, SandboxHandle
from coldframe.runtimes.file_marks import MarksInDirectory, changes
from coldframe.runtimes.native_changes import digest_changes
from coldframe.runtimes.native_egress import NativeEgress
from coldframe.runtimes.native_exec import NativeExec
from coldframe.runtimes.native_guard import NativeGuard
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_request import Plan, Planner, exec_error, question_error

_CONNECT_TIMEOUT_S = 10.0
_KILL_ROUNDS = 100
_NOBODY = {errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.ENETUNREACH}
"""What an address says on which nobody listens, or that is not there at all."""
_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


@dataclass(frozen=True)
class Parts:
    """What a sandbox is made of."""

    spawner: Spawner
    created: Created
    id_base: int
    files: RootFiles
    planner: Planner
    storage: Storage
    egress: NativeEgress
    layers: tuple[Path, ...]
    """Trees of the image, top first."""
    cgroups: Mapping[str, Path]
    """The node's directory in each hierarchy."""
    guards: asyncio.Semaphore
    """How many directories of the node may be guarded at once."""
    command_ended: Callable[[], None]
    """Told of each command's end."""
    keeping: Keeping | None
    """None: it ends with this process."""


class NativeSandbox:
    """See `SandboxHandle`."""

    def __init__(
        self,
        spec: SandboxSpec,
        parts: Parts,
        end: Callable[[NativeSandbox], Awaitable[None]],
    ) -> None:
        """`end` takes everything of it from the kernel and the disk."""
        self.parts = parts
        self._id = parts.created.sandbox_id
        self._guard = NativeGuard(parts)
        self._disk_bytes = spec.disk_bytes
        self._spec = spec
        self._end = end
        self._execs: dict[int, NativeExec] = {}
        self._ending: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self.gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """Its id."""
        return self._id

    @property
    def files(self) -> FileAccess:
        """See `SandboxHandle.files`."""
        return self.parts.files

    # --- exec -------------------------------------------------------------------------

    async def start_exec(self, request: ExecRequest, operation_id: str) -> NativeExec:
        """See `SandboxHandle.start_exec`."""
        self._require_alive()
        plan = self.parts.planner.plan(self.parts.files.tree, request)
        with needing_room("the command was not executed"):
            pipes = CommandPipes.for_request(
                stdin=request.stdin if request.pty is None else None,
                stdin_open=request.stdin_open and request.pty is None,
                status=request.status_pipe,
                outlive=self.parts.keeping is not None,
            )
        try:
            running = self._launch(plan, operation_id, pipes)
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_theirs()
        self._execs[running.execution.exec_id] = running
        await running.begin()
        if operation_id == self._guard.operation_id and running.started is not None:
            self._guard.admit(running.started)
        return running

    def _launch(self, plan: Plan, operation_id: str, pipes: CommandPipes) -> NativeExec:
        keeping = self.parts.keeping
        if keeping is None:
            return self._ask(plan, operation_id, pipes, None)
        with keeping.starting(self._id, operation_id, plan.request, pipes) as keep:
            running = self._ask(plan, operation_id, pipes, keep)
        keeping.started(operation_id, running.execution)
        return running

    def _ask(
        self, plan: Plan, operation_id: str, pipes: CommandPipes, keep: Keep | None
    ) -> NativeExec:
        request = plan.request
        guarded = operation_id == self._guard.operation_id
        kept_stdin = keep is not None and request.stdin_open and pipes.feed is not None
        spec = plan.spec(
            self._id,
            no_new_privs=self._spec.no_new_privileges,
            stdin=pipes.stdin,
            extra=pipes.extra,
            want_started=request.pty is not None
            or request.stdin_open
            or request.status_pipe
            or guarded,
            out_of_reach=guarded,
            keep=keep,
            keep_stdin=pipes.feed.fileno() if kept_stdin and pipes.feed is not None else None,
        )
        try:
            execution = self.parts.spawner.exec(spec)
        except SpawnerFault as fault:
            raise exec_error(fault, plan) from fault
        except SpawnerLostError as error:
            raise SandboxGoneError(f"sandbox {self._id!r} died with its spawner") from error
        except ValueError as error:
            too_long = SpawnerFault(errno.E2BIG, "program", str(error))
            raise exec_error(too_long, plan) from error
        return NativeExec(
            execution,
            plan,
            operation_id,
            feed=pipes.feed,
            status=pipes.status,
            ended=self.exec_ended,
            kept_stdin=kept_stdin,
        )

    def go_on(self, running: NativeExec) -> None:
        """One of its commands, which another process had started, has been found."""
        self._execs[running.execution.exec_id] = running

    def exec_ended(self, running: NativeExec) -> None:
        """One of its commands has ended."""
        self.parts.command_ended()
        if not running.left_processes:
            self._execs.pop(running.execution.exec_id, None)

    # --- processes, ports -------------------------------------------------------------

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """See `SandboxHandle.processes`."""
        return tuple(self._info(found) for found in await self._list())

    async def _list(self) -> list[Process]:
        self._require_alive()
        # Others may begin, end and leave something while the answer is on its way.
        ended = [exec_id for exec_id, running in self._execs.items() if not running.running]
        with self._typed("its processes cannot be listed"):
            found = await self.parts.spawner.processes(self._id)
        alive = {process.exec_id for process in found}
        for exec_id in ended:
            if exec_id not in alive:
                self._execs.pop(exec_id, None)
        return [process for process in found if process.pid != 1]

    def _info(self, process: Process) -> ProcessInfo:
        running = self._execs.get(process.exec_id)
        return ProcessInfo.model_construct(
            pid=process.pid,
            name=process.name.decode("utf-8", "replace"),
            operation_id=None if running is None else running.operation_id,
        )

    async def kill_processes(self, operation_id: str | None = None) -> tuple[ProcessInfo, ...]:
        """See `SandboxHandle.kill_processes`."""
        if operation_id is not None:
            return await self._kill_one(operation_id)
        killed = await self.processes()
        with self._typed("its processes cannot be killed"):
            await self.parts.spawner.kill_all(self._id)
        return killed

    async def _kill_one(self, operation_id: str) -> tuple[ProcessInfo, ...]:
        chosen = [run for run in self._execs.values() if run.operation_id == operation_id]
        killed: dict[int, ProcessInfo] = {}
        for running in chosen:
            exec_id = running.execution.exec_id
            for _ in range(_KILL_ROUNDS):
                mine = [found for found in await self._list() if found.exec_id == exec_id]
                if not mine:
                    break
                killed.update({found.pid: self._info(found) for found in mine})
                with processes.watching([found.host_pid for found in mine]) as ends:
                    # Listed again: a number that was taken over meanwhile is not waited for.
                    still = {found.host_pid for found in await self._list()}
                    await running.signal(signal.SIGKILL, SignalScope.TREE)
                    await ends.wait(still)
            with contextlib.suppress(ColdframeError):  # `wait` tells it to whoever asks
                await running.wait()
        return tuple(killed.values())

    async def listening_ports(self) -> tuple[int, ...]:
        """See `SandboxHandle.listening_ports`."""
        self._require_alive()
        created = self.parts.created
        try:
            besides = LISTENERS if self.parts.egress.active else ()
            return processes.listening_ports(created.pid, created.namespaces["net"], besides)
        except ProcessLookupError as error:
            raise SandboxGoneError(f"sandbox {self._id!r} has ended") from error

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `SandboxHandle.connect`."""
        if not 1 <= port <= 65535:
            raise InvalidRequestError(f"port {port} is not in 1..65535")
        self._require_alive()
        reason: str | None = None
        for family, address in _LOOPBACKS:
            with self._typed("no socket can be made in it"):
                made = forks.own_socket(await self.parts.spawner.make_socket(self._id, family))
            try:
                loop = asyncio.get_running_loop()
                await asyncio.wait_for(loop.sock_connect(made, (address, port)), _CONNECT_TIMEOUT_S)
                return await asyncio.open_connection(sock=made)
            except (OSError, TimeoutError) as error:
                made.close()
                if error.errno not in _NOBODY:
                    reason = reason or (os.strerror(error.errno) if error.errno else "timed out")
            except BaseException:
                made.close()
                raise
        raise PortUnreachableError(
            f"port {port} of sandbox {self._id!r}: {reason or 'nothing listens on it'}; "
            "see listening_ports()"
        )

    # --- network ----------------------------------------------------------------------

    async def set_network(self, policy: NetworkPolicy) -> None:
        """See `SandboxHandle.set_network`."""
        self._require_alive()
        await self.parts.egress.set_policy(policy)
        self._spec = self._spec.model_copy(update={"network": policy})
        if self.parts.keeping is not None:
            self.parts.keeping.note_network(self._id, self._spec, self.parts.egress.resolv_before)

    def egress_events(self, cursor: int, limit: int) -> EgressEvents:
        """See `SandboxHandle.egress_events`."""
        return self.parts.egress.events(cursor, limit)

    def tell_egress(self, told: Callable[[EgressEvent], None]) -> None:
        """See `TellsEgress`."""
        self.parts.egress.tell(told)

    # --- guards -----------------------------------------------------------------------

    async def extend_disk(self, extra_bytes: int) -> None:
        """See `SandboxHandle.extend_disk`."""
        self._require_alive()
        if self._disk_bytes is not None:
            wide = self._disk_bytes + extra_bytes
            await run_to_its_end(self.parts.storage.widen, self._id, wide)

    async def guard(self, request: GuardRequest) -> None:
        """See `SandboxHandle.guard`."""
        others = [found.host_pid for found in await self._list()]
        await self._guard.begin(request, others)

    async def guard_report(self) -> GuardReport:
        """See `SandboxHandle.guard_report`."""
        self._require_alive()
        return await self._guard.report()

    async def unguard(self) -> None:
        """See `SandboxHandle.unguard`."""
        await self._guard.end(unmount=True)

    # --- ending -----------------------------------------------------------------------

    async def export_upper(self, target: Path) -> None:
        """See `SandboxHandle.export_upper`. The content of `target` is durable only once synced.

        Raises StorageFullError, SandboxGoneError.
        """
        await self.kill_processes()
        directory = self.parts.storage.open(self._id)
        await run_to_its_end(export_layer, directory, b"upper", target)

    async def digest_changes(self, seed: bytes, limit_s: float) -> str:
        """See `KnowsChanges.digest_changes`."""
        self._require_alive()
        patience = Patience(limit_s)
        with self.open_upper() as upper:
            return await run_to_its_end(
                digest_changes,
                *(upper, self.parts.layers, patience, seed),
                cancelled=patience.lose,
            )

    async def changes(self, since: str | None, most: int, limit_s: float) -> FileChanges:
        """See `SandboxHandle.changes`."""
        patience = Patience(limit_s)
        async with self._looking:
            self._require_alive()
            with (
                closing(self.parts.storage.open(self._id)) as directory,
                self.open_upper() as upper,
            ):
                marks = MarksInDirectory(directory)
                return await run_to_its_end(
                    partial(changes, most=most, patience=patience),
                    *(upper, self.parts.layers, marks, since),
                    cancelled=patience.lose,
                )

    @contextlib.contextmanager
    def open_upper(self) -> Iterator[int]:
        """A descriptor of what it has written, in layer form."""
        with (
            closing(self.parts.storage.open(self._id)) as directory,
            closing(os.open("upper", DIRECTORY, dir_fd=directory)) as upper,
        ):
            yield upper

    async def destroy(self) -> None:
        """See `SandboxHandle.destroy`."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._ending)
        self._execs.clear()

    async def _destroy(self) -> None:
        await self._guard.end(unmount=False)
        await self._end(self)

    @property
    def ended(self) -> bool:
        """Whether it was destroyed, or is being so."""
        return self._ending is not None

    def note_gone(self, cause: str) -> None:
        """It ended without being asked to."""
        if not self.gone.done() and self._ending is None:
            self.gone.set_result(Gone(cause))

    def _require_alive(self) -> None:
        if self._ending is not None or self.gone.done():
            raise SandboxGoneError(f"sandbox {self._id!r} has ended")

    @contextlib.contextmanager
    def _typed(self, what: str) -> Iterator[None]:
        """Raise what a question that the spawner could not answer means."""
        try:
            yield
        except SpawnerFault as fault:
            raise question_error(fault, self._id, what) from fault
        except SpawnerLostError as error:
            raise SandboxGoneError(f"sandbox {self._id!r} has ended: {what}: {error}") from error


async def kill_init(sandbox: SandboxHandle) -> None:
    """Kill a native sandbox's pid 1, as the OOM killer might; for checks."""
    assert isinstance(sandbox, NativeSandbox)
    os.kill(sandbox.parts.created.pid, signal.SIGKILL)
