"""A command in a sandbox, as the spawner's worker knows it: ask for it, and about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from coldframe.host import answers, requests, wire
from coldframe.host.outcome import Outcome
from coldframe.host.spawner_types import ExecEnd, ExecSpec, Keep, OutputSpools, Progress, Started
from coldframe.host.wire import Field, Fields, FrameType, Scope, Tag, Type
from coldframe.host.worker import Worker

T = TypeVar("T")
EXEC = "exec."
"""Under this and its number something is kept with a command."""
STDIN = "stdin."
"""Under this and its number the worker keeps the writing end of a command's stdin."""
MORE = "more."
"""Under this and its number is kept what its node notes of a command while it goes on."""


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
    worker: Worker = field(repr=False)

    async def output(self) -> OutputSpools:
        """Its spool files, from now on kept up to date. ENOENT: not kept any more."""
        return await self._ask(Type.EXEC_OUTPUT, answers.decode_output)

    async def watch(self, stdout_seen: int, stderr_seen: int) -> Progress:
        """Return when a total is past what was seen, or nothing more will come."""
        extra = (Tag.SEEN, wire.U64_PAIR.pack(stdout_seen, stderr_seen))
        return await self._ask(Type.EXEC_WATCH, answers.decode_progress, extra)

    async def mark(self) -> Progress:
        """Read the pipes until they are empty, and tell how far the streams are."""
        return await self._ask(Type.EXEC_MARK, answers.decode_progress)

    async def signal(self, signum: int, scope: Scope = Scope.GROUP) -> int:
        """Send a signal; return how many processes it reached (a group counts as one)."""
        extra = (Tag.SIGNAL_NUMBERS, wire.U64_PAIR.pack(signum, scope))
        return await self._ask(Type.SIGNAL, answers.decode_count, extra)

    async def forget(self) -> None:
        """Drop its spool once it has ended; what it left running goes on."""
        await self._ask(Type.EXEC_FORGET, answers.decode_nothing)

    def drop_stdin(self) -> None:
        """Let the worker close its copy of the writing end of its stdin, at once."""
        self.worker.drop_now(f"{STDIN}{self.exec_id}")

    async def _ask(
        self, frame_type: FrameType, decode: Callable[[Fields, list[int]], T], *extra: Field
    ) -> T:
        fields = [(Tag.EXEC_ID, wire.U64.pack(self.exec_id)), *extra]
        return await self.worker.ask(frame_type, fields, decode)


def start(worker: Worker, exec_id: int, spec: ExecSpec) -> Execution:
    """Ask a worker for a command. See `Spawner.exec`."""
    ended: Outcome[ExecEnd] = Outcome()
    started: Outcome[Started] | None = Outcome() if spec.want_started else None
    descriptors: list[int] = []
    fields = requests.exec_fields(spec, exec_id, descriptors)
    if spec.keep_stdin is not None:
        # Before: without it, the command would see the end of its stdin when we die.
        worker.keep(f"{STDIN}{exec_id}", Keep(b"", (spec.keep_stdin,)))
    worker.send(Type.EXEC, fields, answers.ExecAnswer(ended, started), descriptors)
    return Execution(spec.sandbox_id, exec_id, ended, started, worker)


def follow(worker: Worker, sandbox_id: str, exec_id: int) -> Execution:
    """Follow a command that another daemon asked for; it may have ended.

    `started` tells of one that still runs.
    """
    ended: Outcome[ExecEnd] = Outcome()
    started: Outcome[Started] = Outcome()
    fields: list[Field] = [(Tag.KEPT, f"{EXEC}{exec_id}".encode())]
    worker.send(Type.AWAIT, fields, answers.ExecAnswer(ended, started))
    return Execution(sandbox_id, exec_id, ended, started, worker)
