"""Go on with what another process's native runtime has left with its spawner workers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldframe.host import workers
from coldframe.host.cgroups import NodeCgroups
from coldframe.host.descriptors import close_all
from coldframe.host.execution import EXEC, MORE, STDIN, follow
from coldframe.host.pipes import STATUS_NAMES, StatusStream, StdinFeed
from coldframe.host.spawner import Created, Kept, Spawner, SpawnerFault
from coldframe.host.wire import GoneCause, KeptState
from coldframe.host.worker import Worker
from coldframe.protocol.errors import SpawnerLostError
from coldframe.runtimes.base import Gone
from coldframe.runtimes.native_exec import NativeExec
from coldframe.runtimes.native_keeping import (
    IDS,
    NODE,
    ExecNote,
    SandboxNote,
    read_exec,
    read_sandbox,
    unpacked,
)
from coldframe.runtimes.native_request import Plan
from coldframe.runtimes.outliving import FoundExec, NothingFoundError

_AT_ONCE = 64


@dataclass(frozen=True)
class LeftSandbox:
    """One sandbox that was kept."""

    id: str
    worker: Worker
    note: SandboxNote
    held: tuple[int, ...]
    """Descriptors of its upper, for `storage.adopt`."""
    created: Created | None
    """None: it has ended."""
    gone: Gone | None
    """How it ended by itself, if it did."""


@dataclass(frozen=True)
class LeftExec:
    """One command that was kept."""

    exec_id: int
    worker: Worker
    note: ExecNote
    held: tuple[int, ...]
    stdin: int | None
    ended_at: float | None
    more: bytes | None
    """See `FoundExec.more`."""


@dataclass(frozen=True)
class Left:
    """All that was kept. The descriptors belong to the receiver."""

    complete: bool
    """Whether every worker is still there."""
    lock: int
    cgroups: NodeCgroups
    storage: str
    """Its kind."""
    fallback: str
    storage_held: tuple[int, ...]
    blocks: dict[int, int]
    """Locks of blocks of id ranges, by number."""
    program: str
    sandboxes: tuple[LeftSandbox, ...]
    execs: tuple[LeftExec, ...]


async def connect(sockets: Path, spawner: Spawner) -> bool:
    """Let a spawner take over all workers that are there; return whether these were all.

    Raises:
        NothingFoundError: there are none.
        VersionMismatchError: they speak another protocol.
    """
    reached, gone = await asyncio.to_thread(workers.connect_all, sockets)
    await spawner.attach(reached)
    if not spawner.pids:
        raise NothingFoundError
    return not gone and len(spawner.pids) == len(reached)


async def look(spawner: Spawner, *, complete: bool) -> Left:
    """Return what a spawner's workers have kept.

    Raises:
        NothingFoundError: not even the node's own things.
    """
    kept = await spawner.kept()
    named: dict[str, Kept] = {}
    stdins: dict[tuple[Worker, str], int] = {}
    mores: dict[tuple[Worker, str], bytes] = {}
    sandboxes: list[tuple[Worker, Kept]] = []
    execs: list[tuple[Worker, Kept]] = []
    for worker, one in kept:
        if one.name.startswith(EXEC):
            execs.append((worker, one))
        elif one.name.startswith(STDIN):
            stdins[worker, one.name.removeprefix(STDIN)] = one.descriptors[0]
        elif one.name.startswith(MORE):
            (more,), _ = unpacked(one.note, one.descriptors)
            mores[worker, one.name.removeprefix(MORE)] = more
        elif one.state is not KeptState.PLAIN:
            sandboxes.append((worker, one))
        elif one.name in named:
            close_all(list(one.descriptors))  # every worker has the same
        else:
            named[one.name] = one
    if NODE not in named:
        raise NothingFoundError
    node = named.pop(NODE)
    told = json.loads(node.note)
    lefts = [_exec(worker, one, stdins, mores) for worker, one in execs]
    for (worker, number), fd in stdins.items():  # of commands that have ended
        os.close(fd)
        worker.drop(f"{STDIN}{number}")
    for worker, number in mores:  # of commands that were being dropped
        worker.drop(f"{MORE}{number}")
    return Left(
        complete,
        node.descriptors[0],
        NodeCgroups(
            {name: Path(path) for name, path in told["cgroups"].items()}, frozenset(told["limits"])
        ),
        told["storage"],
        told["fallback"],
        node.descriptors[1:],
        {
            int(name.removeprefix(IDS)): one.descriptors[0]
            for name, one in named.items()
            if name.startswith(IDS)
        },
        told["program"],
        await _all(_sandbox(spawner, worker, one) for worker, one in sandboxes),
        tuple(sorted(lefts, key=lambda left: left.exec_id)),
    )


def _exec(
    worker: Worker,
    kept: Kept,
    stdins: dict[tuple[Worker, str], int],
    mores: dict[tuple[Worker, str], bytes],
) -> LeftExec:
    lines, held = unpacked(kept.note, kept.descriptors)
    number = kept.name.removeprefix(EXEC)
    running = kept.state is KeptState.RUNNING
    stdin = stdins.pop((worker, number), None) if running else None
    ended_at = None if running else kept.ended_at
    more = mores.pop((worker, number), None)
    return LeftExec(int(number), worker, read_exec(lines), tuple(held), stdin, ended_at, more)


async def _sandbox(spawner: Spawner, worker: Worker, kept: Kept) -> LeftSandbox:
    lines, held = unpacked(kept.note, kept.descriptors)
    created, gone = None, None
    if kept.state is KeptState.GONE:
        gone = Gone(gone_cause(kept.cause, kept.code))
        await _destroyed(spawner, worker, kept.name)
    elif kept.state is not KeptState.ABSENT:
        try:
            created = await spawner.await_sandbox(worker, kept.name)
        except SpawnerFault:
            # It ended in this moment, or could not be made.
            gone = Gone("signal 9")
            await _destroyed(spawner, worker, kept.name)
    return LeftSandbox(kept.name, worker, read_sandbox(lines), tuple(held), created, gone)


async def _destroyed(spawner: Spawner, worker: Worker, sandbox_id: str) -> None:
    """Take the rest of a sandbox that has ended from its worker."""
    try:
        await spawner.destroy_of(worker, sandbox_id)
    except (SpawnerFault, SpawnerLostError):
        return


async def _all(jobs: Iterable[Awaitable[LeftSandbox]]) -> tuple[LeftSandbox, ...]:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(job: Awaitable[LeftSandbox]) -> LeftSandbox:
        async with turns:
            return await job

    return tuple(await asyncio.gather(*(one(job) for job in jobs)))


def gone_cause(cause: int, code: int) -> str:
    """Say how a sandbox ended by itself. See `Gone.cause`."""
    said = {
        GoneCause.OOM: "oom",
        GoneCause.SIGNAL: f"signal {code}",
    }
    return said.get(GoneCause(cause), f"exit {code}")


def go_on(left: LeftExec, ended: Callable[[NativeExec], None]) -> NativeExec:
    """Follow a command that another process had started; `ended` as of `NativeExec`."""
    note = left.note
    status: StatusStream | None = None
    if note.pipes == STATUS_NAMES and len(left.held) == len(STATUS_NAMES):
        status = StatusStream(*left.held)
    running = NativeExec(
        follow(left.worker, note.sandbox_id, left.exec_id),
        Plan.of(note.request),
        note.operation_id,
        feed=None if left.stdin is None else StdinFeed(left.stdin),
        status=status,
        ended=ended,
    )
    running.go_on()
    return running


def found(left: LeftExec, running: NativeExec) -> FoundExec:
    """What a node is told of it."""
    note = left.note
    return FoundExec(
        note.sandbox_id,
        note.operation_id,
        note.node,
        note.request,
        running,
        left.ended_at,
        left.more,
    )


def uppers_of(sandboxes: Sequence[LeftSandbox]) -> dict[str, str]:
    """Names in the storage of the uppers that are in use, by sandbox."""
    return {one.id: one.note.upper for one in sandboxes if one.created is not None}
