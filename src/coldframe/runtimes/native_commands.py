"""The commands of one native sandbox, and the processes that belong to them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal

from coldframe.host import processes
from coldframe.host.descriptors import needing_room
from coldframe.host.pipes import CommandPipes
from coldframe.host.spawner import Keep, Process, SpawnerFault
from coldframe.protocol.errors import ColdframeError, SandboxGoneError, SpawnerLostError
from coldframe.protocol.models import ExecRequest, ProcessInfo, SignalScope
from coldframe.runtimes.native_exec import NativeExec
from coldframe.runtimes.native_faults import exec_error, typed_question
from coldframe.runtimes.native_guard import NativeGuard
from coldframe.runtimes.native_parts import Parts
from coldframe.runtimes.native_request import Plan

_KILL_ROUNDS = 100


class NativeCommands:
    """Those that run, or left something running when they ended."""

    def __init__(self, parts: Parts, guard: NativeGuard) -> None:
        self._parts, self._guard = parts, guard
        self._id = parts.created.sandbox_id
        self._known: dict[int, NativeExec] = {}

    # --- starting ---------------------------------------------------------------------

    async def start(self, request: ExecRequest, operation_id: str) -> NativeExec:
        """See `SandboxHandle.start_exec`."""
        plan = self._parts.planner.plan(self._parts.files.tree, request)
        with needing_room("the command was not executed"):
            pipes = CommandPipes.for_request(
                stdin=request.stdin if request.pty is None else None,
                stdin_open=request.stdin_open and request.pty is None,
                status=request.status_pipe,
                outlive=self._parts.keeping is not None,
            )
        try:
            running = self._launch(plan, operation_id, pipes)
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_theirs()
        self.add(running)
        await running.begin()
        if operation_id == self._guard.operation_id and running.started is not None:
            self._guard.admit(running.started)
        return running

    def _launch(self, plan: Plan, operation_id: str, pipes: CommandPipes) -> NativeExec:
        keeping = self._parts.keeping
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
            stdin=pipes.stdin,
            status=pipes.status_end,
            want_started=request.pty is not None
            or request.stdin_open
            or request.status_pipe
            or guarded,
            out_of_reach=guarded,
            keep=keep,
            keep_stdin=pipes.feed.fileno() if kept_stdin and pipes.feed is not None else None,
        )
        try:
            execution = self._parts.spawner.exec(spec)
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
            ended=self.ended,
            kept_stdin=kept_stdin,
        )

    def add(self, running: NativeExec) -> None:
        """One has been started, or found: another process had started it."""
        self._known[running.execution.exec_id] = running

    def ended(self, running: NativeExec) -> None:
        """One has ended."""
        self._parts.command_ended()
        if not running.left_processes:
            self._known.pop(running.execution.exec_id, None)

    def forget_all(self) -> None:
        """The sandbox is no more."""
        self._known.clear()

    # --- processes --------------------------------------------------------------------

    async def processes(self) -> list[Process]:
        """All processes of the sandbox but its pid 1. Raises SandboxGoneError."""
        await asyncio.gather(*(one.launched() for one in self._known.values() if one.running))
        # Others may begin, end and leave something while the answer is on its way.
        ended = [exec_id for exec_id, running in self._known.items() if not running.running]
        with typed_question(self._id, "its processes cannot be listed"):
            found = await self._parts.spawner.processes(self._id)
        alive = {process.exec_id for process in found}
        for exec_id in ended:
            if exec_id not in alive:
                self._known.pop(exec_id, None)
        return [process for process in found if process.pid != 1]

    def info(self, process: Process) -> ProcessInfo:
        """What is told of a process."""
        running = self._known.get(process.exec_id)
        return ProcessInfo.model_construct(
            pid=process.pid,
            name=process.name.decode("utf-8", "replace"),
            operation_id=None if running is None else running.operation_id,
        )

    async def kill_all(self) -> tuple[ProcessInfo, ...]:
        """Kill everything but pid 1; return what was killed, once dead."""
        killed = tuple(map(self.info, await self.processes()))
        with typed_question(self._id, "its processes cannot be killed"):
            await self._parts.spawner.kill_all(self._id)
        return killed

    async def kill(self, operation_id: str) -> tuple[ProcessInfo, ...]:
        """As `kill_all`, of one command."""
        chosen = [run for run in self._known.values() if run.operation_id == operation_id]
        killed: dict[int, ProcessInfo] = {}
        for running in chosen:
            exec_id = running.execution.exec_id
            for _ in range(_KILL_ROUNDS):
                mine = [found for found in await self.processes() if found.exec_id == exec_id]
                if not mine:
                    break
                killed.update({found.pid: self.info(found) for found in mine})
                with processes.watching([found.host_pid for found in mine]) as ends:
                    # Listed again: a number that was taken over meanwhile is not waited for.
                    still = {found.host_pid for found in await self.processes()}
                    await running.signal(signal.SIGKILL, SignalScope.TREE)
                    await ends.wait(still)
            with contextlib.suppress(ColdframeError):  # `wait` tells it to whoever asks
                await running.wait()
        return tuple(killed.values())
