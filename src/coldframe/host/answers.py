"""Turn the fields of answers into values, and hand them to the futures that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from coldframe.host import wire
from coldframe.host.descriptors import close_all, no_room
from coldframe.host.outcome import Outcome
from coldframe.host.spawner_types import (
    Created,
    ExecEnd,
    Kept,
    Leftover,
    OutputSpools,
    Place,
    Process,
    Progress,
    SandboxGone,
    SpawnerFault,
    Started,
    StreamEnd,
    WorkerStat,
)
from coldframe.host.wire import Fields, Tag, Type
from coldframe.protocol.errors import Execution

T = TypeVar("T")
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


def _must(fields: Fields, tag: int) -> memoryview:
    for found, value in fields:
        if found == tag:
            return value
    raise wire.ProtocolError(f"field {tag} is missing")


def _descriptor(fields: Fields, tag: int, descriptors: list[int]) -> int:
    (index,) = wire.U32.unpack(_must(fields, tag))
    return descriptors[int(index)]


def _numbers(fields: Fields) -> list[int]:
    return [wire.U64.unpack(value)[0] for tag, value in fields if tag == Tag.NUMBER]


def _fault(fields: Fields) -> SpawnerFault:
    (code,) = wire.U64.unpack(_must(fields, Tag.ERRNO))
    stage = bytes(_must(fields, Tag.STAGE)).decode("utf-8", "replace")
    message = bytes(_must(fields, Tag.MESSAGE)).decode("utf-8", "replace")
    return SpawnerFault(code, stage, message)


class Answer(Generic[T]):
    """Waits for one answer; descriptors of an answer that nobody wants are closed."""

    __slots__ = ("_decode", "future")

    def __init__(
        self,
        future: asyncio.Future[T] | Outcome[T],
        decode: Callable[[Fields, list[int]], T],
    ) -> None:
        self.future, self._decode = future, decode

    def answer(self, frame_type: int, fields: Fields, descriptors: list[int]) -> bool:
        if self.future.done():
            close_all(descriptors)
        elif frame_type == Type.ERROR:
            self.future.set_exception(_fault(fields))
        else:
            self.future.set_result(self._decode(fields, descriptors))
        return True

    def lose(self, _: int) -> bool:
        self.fail(no_room("the spawner's answer was lost"))
        return True

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class ExecAnswer(Answer[ExecEnd]):
    """Waits for STARTED, if asked for, and then for the end."""

    __slots__ = ("_started",)

    def __init__(self, ended: Outcome[ExecEnd], started: Outcome[Started] | None) -> None:
        super().__init__(ended, decode_end)
        self._started = started

    def answer(self, frame_type: int, fields: Fields, descriptors: list[int]) -> bool:
        started = self._started
        if frame_type == Type.STARTED:
            if started is None or started.done():
                close_all(descriptors)
            else:
                started.set_result(decode_started(fields, descriptors))
            return False
        if frame_type == Type.ERROR and started is not None and not started.done():
            started.set_exception(_fault(fields))
        return super().answer(frame_type, fields, descriptors)

    def lose(self, frame_type: int) -> bool:
        started = self._started
        if frame_type == Type.STARTED:
            if started is not None and not started.done():
                what = "the command was started, but its terminal cannot be reached"
                started.set_exception(no_room(what, execution=Execution.EXECUTED))
            return False
        what = "the command was executed and has ended, but its output was lost"
        self.fail(no_room(what, execution=Execution.EXECUTED))
        return True

    def fail(self, error: Exception) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        super().fail(error)


def decode_started(fields: Fields, descriptors: list[int]) -> Started:
    host_pid, pid = wire.U64_PAIR.unpack(_must(fields, Tag.STARTED_NUMBERS))
    return Started(host_pid, pid, descriptors[0] if descriptors else None)


def decode_end(fields: Fields, descriptors: list[int]) -> ExecEnd:
    data: dict[int, bytes] = {}
    leftovers: list[Leftover] = []
    numbers: memoryview | None = None
    unspooled: dict[int, int] = {}
    for tag, value in fields:
        if tag == Tag.END_NUMBERS:
            numbers = value
        elif tag == Tag.LEFTOVER:
            (pid,) = wire.U64.unpack_from(value)
            leftovers.append(Leftover(pid, bytes(value[8:])))
        elif tag == Tag.SPOOL_ERRNO:
            stream, code = wire.U64_PAIR.unpack(value)
            unspooled[stream] = code
        else:
            data[tag] = bytes(value)
    if numbers is None:
        raise wire.ProtocolError("the end of an exec without its numbers")
    values = wire.END_NUMBERS.unpack(numbers)
    kind, code, reason, started, duration, user, system, peak, read, written, ooms = values[:11]
    out_total, err_total, out_digest, err_digest = values[11:]

    def end_of(total: int, digest: bytes, kept: int, spool: int, number: int) -> StreamEnd:
        at = data.get(spool)
        fd = None if at is None else descriptors[wire.U32.unpack(at)[0]]
        return StreamEnd(total, digest, data.get(kept), fd, unspooled.get(number, 0))

    return ExecEnd(
        kind == 2,
        code,
        wire.Reason(reason),
        started,
        started + duration,
        duration,
        user,
        system,
        peak,
        read,
        written,
        ooms,
        end_of(out_total, out_digest, Tag.STDOUT_DATA, Tag.STDOUT_FD, 1),
        end_of(err_total, err_digest, Tag.STDERR_DATA, Tag.STDERR_FD, 2),
        tuple(leftovers),
    )


def decode_progress(fields: Fields, _: list[int] | None = None) -> Progress:
    out, err, flags, spool = wire.PROGRESS_NUMBERS.unpack(_must(fields, Tag.PROGRESS_NUMBERS))
    flag = wire.ProgressFlag
    return Progress(
        out,
        err,
        bool(flags & flag.STDOUT_EOF),
        bool(flags & flag.STDERR_EOF),
        bool(flags & flag.ENDED),
        spool,
    )


def decode_output(fields: Fields, descriptors: list[int]) -> OutputSpools:
    return OutputSpools(descriptors[0], descriptors[1], decode_progress(fields))


def decode_created(fields: Fields, descriptors: list[int]) -> Created:
    sandbox_id = bytes(_must(fields, Tag.SANDBOX)).decode()
    pid, *inodes = wire.CREATED_NUMBERS.unpack(_must(fields, Tag.CREATED_NUMBERS))
    return Created(
        sandbox_id,
        pid,
        _descriptor(fields, Tag.ROOT_FD, descriptors),
        _descriptor(fields, Tag.PIDFD, descriptors),
        dict(zip(_NAMESPACES, inodes, strict=True)),
    )


def decode_processes(fields: Fields, _: list[int]) -> tuple[Process, ...]:
    found: list[Process] = []
    for tag, value in fields:
        if tag == Tag.PROCESS:
            pid, host_pid, exec_id = wire.PROCESS_NUMBERS.unpack_from(value)
            name = bytes(value[wire.PROCESS_NUMBERS.size :])
            found.append(Process(pid, host_pid, exec_id, name))
    return tuple(found)


def decode_count(fields: Fields, _: list[int]) -> int:
    return _numbers(fields)[0]


def decode_place(fields: Fields, _: list[int]) -> Place:
    pid, network = _numbers(fields)
    return Place(pid, network)


def decode_nothing(fields: Fields, _: list[int]) -> None:
    return None


def decode_descriptor(_: Fields, descriptors: list[int]) -> int:
    return descriptors[0]


def decode_durations(fields: Fields, _: list[int]) -> tuple[int, ...]:
    value = _must(fields, Tag.DURATIONS)
    return tuple(number for (number,) in wire.U64.iter_unpack(value))


def decode_stat(fields: Fields, _: list[int]) -> WorkerStat:
    """OK of STAT."""
    return WorkerStat(*_numbers(fields))


def decode_kept(fields: Fields, descriptors: list[int]) -> tuple[Kept, ...]:
    """KEPT_PAGE."""
    found: list[Kept] = []
    name, numbers, note, held = "", (0,) * 5, b"", list[int]()

    def close_entry() -> None:
        if name:
            serial, state, cause, code, ended = numbers
            kind = wire.KeptState(state)
            found.append(Kept(name, serial, kind, cause, code, ended / 1e9, note, tuple(held)))

    for tag, value in fields:
        if tag == Tag.KEPT:
            close_entry()
            name, held = bytes(value).decode(), []
        elif tag == Tag.KEPT_NUMBERS:
            numbers = wire.KEPT_NUMBERS.unpack(value)
        elif tag == Tag.NOTE:
            note = bytes(value)
        elif tag == Tag.KEEP_FD:
            held.append(descriptors[wire.U32.unpack(value)[0]])
    close_entry()
    return tuple(found)


def decode_gone(fields: Fields) -> SandboxGone:
    """The event that a sandbox ended by itself."""
    cause, code = wire.U64_PAIR.unpack(_must(fields, Tag.GONE_NUMBERS))
    sandbox_id = bytes(_must(fields, Tag.SANDBOX)).decode()
    return SandboxGone(sandbox_id, wire.GoneCause(cause), code)


def decode_worker(fields: Fields, _: list[int]) -> tuple[int, int]:
    """OK of HELLO and ATTACH: a worker's version of the protocol, and its pid."""
    (version,) = wire.U64.unpack(_must(fields, Tag.VERSION))
    return version, _numbers(fields)[0]
