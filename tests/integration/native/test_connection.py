"""A worker and a peer that does not keep to the protocol."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import socket
import struct
from pathlib import Path

import pytest

from coldframe.host import wire
from coldframe.host.spawner import Spawner, SpawnerFault
from coldframe.host.wire import Tag, Type
from coldframe.protocol.errors import CapacityError, Execution, SpawnerLostError
from tests.fixtures.native import Native, running

# Reaching into the spawner is the point here: the public face cannot send what is wrong.


def _socket_of(spawner: Spawner) -> socket.socket:
    return spawner._workers[0].link._sock


async def _ask(native: Native, frame_type: int, fields: list[tuple[int, bytes]]) -> object:
    from coldframe.host import answers

    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    worker = native.spawner._workers[0]
    waiter = answers.Answer(future, lambda fields, _: fields)
    worker.link.request(frame_type, fields, waiter)  # type: ignore[arg-type]
    return await future


@pytest.mark.parametrize(
    ("frame_type", "fields"),
    [
        (33, []),
        (Type.STAT, [(999, b"")]),
        (Type.HELLO, [(Tag.VERSION, bytes(8))]),
        (Type.DESTROY, [(Tag.SANDBOX, b"a\0b")]),
        (Type.DESTROY, [(Tag.SANDBOX, b"a" * 65)]),
        (Type.DESTROY, []),
        (Type.CREATE, [(Tag.SANDBOX, b"x")]),
        (Type.CREATE, [(Tag.CREATE_NUMBERS, b"short")]),
        (Type.EXEC, [(Tag.EXEC_NUMBERS, bytes(88))]),
        (Type.EXEC, [(Tag.STDIN_FD, struct.pack(">I", 3))]),
        (Type.EXEC, [(Tag.ARG, b"a\0")]),
        (Type.SIGNAL, [(Tag.EXEC_ID, bytes(8)), (Tag.SIGNAL_NUMBERS, bytes(15))]),
        (Type.REMOVE_TREE, [(Tag.NAME, b"x")]),
        (Type.MEASURE, [(Tag.COUNT, wire.U64.pack(10**9)), (Tag.PATH, b"/bin/true")]),
        (Type.EXEC_WATCH, [(Tag.EXEC_ID, wire.U64.pack(5)), (Tag.SEEN, bytes(16))]),
    ],
)
async def test_bad_request_is_answered_and_changes_nothing(
    native: Native, frame_type: int, fields: list[tuple[int, bytes]]
) -> None:
    """A worker never dies of what it is asked; other sandboxes live in it."""
    sandbox = await native.create()

    with pytest.raises(SpawnerFault) as caught:
        await _ask(native, frame_type, fields)

    assert caught.value.errno in {errno.EPROTO, errno.EINVAL, errno.ENOENT}
    assert (await native.run(sandbox, "true")).code == 0


@pytest.mark.parametrize(
    "number", [0, 1, 65535, 65537, 0xFFFF0000, 1 << 40], ids=lambda n: f"base{n:x}"
)
async def test_create_with_ids_of_the_host_is_refused(native: Native, number: int) -> None:
    """Id base 0 would make root inside root outside."""
    with pytest.raises(SpawnerFault) as caught:
        await native.create(id_base=number)

    assert (caught.value.errno, caught.value.stage) == (errno.EINVAL, "request")


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "/etc"])
async def test_remove_tree_of_what_is_no_name_is_refused(
    native: Native, name: str, tmp_path: Path
) -> None:
    """One name in the given directory, and nothing that leads out of it."""
    (tmp_path / "inner").mkdir()
    fd = os.open(tmp_path / "inner", os.O_DIRECTORY)
    with pytest.raises(SpawnerFault) as caught:
        await native.spawner.remove_tree(fd, name)
    os.close(fd)

    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        bytes(64),
        struct.pack(">IHHQ", 12, 13, 9, 1),
        struct.pack(">IHHQ", 12, 13, 0, 0),
    ],
    ids=["long", "short", "descriptors", "event"],
)
async def test_malformed_frame_ends_the_worker_with_all_it_made(
    native_home: Path, garbage: bytes
) -> None:
    """Where the stream makes no sense any more, only a clean end is safe."""
    async with running(native_home) as native:
        sandbox = await native.create()
        execution = native.start(sandbox, "sleep", "100")
        await native.wait_for_names(sandbox, b"sleep")

        _socket_of(native.spawner).send(garbage)

        with pytest.raises(SpawnerLostError):
            await execution.ended
        assert native.lost == [sandbox.sandbox_id]
        async with asyncio.timeout(60):
            while native.cgroups() or native.processes():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_random_frames_never_crash_a_worker(native_home: Path) -> None:
    """With COLDFRAME_TEST_NATIVE=native/build/coldframe-native-asan this is a fuzzer."""
    rng = random.Random(7)
    tags = [number for name, number in vars(Tag).items() if name.isupper()]
    async with running(native_home) as native:
        sandbox = await native.create()
        asked = []
        for _ in range(1500):
            fields: list[tuple[int, bytes]] = []
            for _ in range(rng.randrange(6)):
                length = rng.choice([0, 1, 4, 8, 16, 32, 56, 88, 300])
                value = rng.choice([rng.randbytes(length), bytes(length)])
                fields.append((rng.choice(tags), value))
            if rng.random() < 0.5:
                fields.append((Tag.SANDBOX, sandbox.sandbox_id.encode()))
            kind = rng.choice([2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 15, 40])
            asked.append(asyncio.ensure_future(_ask(native, kind, fields)))
            if len(asked) % 100 == 0:
                await asyncio.sleep(0)
        answered = await asyncio.gather(*asked, return_exceptions=True)

        assert not any(isinstance(answer, SpawnerLostError) for answer in answered)
        assert (await native.run(sandbox, "true")).code == 0
        for answer in answered:
            if not isinstance(answer, BaseException):
                del answer


async def test_slow_reader_does_not_lose_answers(native: Native) -> None:
    """Answers queue while the node is busy, with the descriptors that belong to them."""
    sandbox = await native.create()
    big = "head -c 400000 /dev/zero"
    executions = [native.start(sandbox, "sh", "-c", big, inline_bytes=1 << 20) for _ in range(12)]
    spooled = [native.start(sandbox, "sh", "-c", big, inline_bytes=0) for _ in range(12)]
    loop = asyncio.get_running_loop()
    fd = _socket_of(native.spawner).fileno()
    link = native.spawner._workers[0].link
    loop.remove_reader(fd)
    await asyncio.sleep(1)
    loop.add_reader(fd, link._readable)

    ends = await asyncio.gather(*(e.ended for e in executions))
    spools = await asyncio.gather(*(e.ended for e in spooled))

    assert {end.stdout.data for end in ends} == {bytes(400000)}
    for end in spools:
        assert end.stdout.spool_fd is not None
        assert os.pread(end.stdout.spool_fd, 500000, 0) == bytes(400000)
        end.close()


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


async def _until_idle(native: Native, worker: int, processes: int) -> None:
    """Return once so many processes are left in the sandbox, and the worker has dealt with it."""
    seen = ""
    async with asyncio.timeout(30):
        while True:
            status = _status(worker)
            idle = "State:\tS" in status and status == seen
            if idle and len(native.processes()) == processes:
                return
            seen = status
            await asyncio.sleep(0.05)


async def test_answer_that_found_no_room_while_it_waited_is_lost_alone(native: Native) -> None:
    """Every sandbox of the worker would be lost with its connection."""
    sandbox = await native.create()
    big = "head -c 400000 /dev/zero"
    go, go_write = os.pipe()
    spooled = [
        native.start(sandbox, "sh", "-c", f"{big}; read x", inline_bytes=0, stdin=go)
        for _ in range(3)
    ]
    full = [native.start(sandbox, "sh", "-c", big, inline_bytes=1 << 20) for _ in range(6)]
    loop = asyncio.get_running_loop()
    link = native.spawner._workers[0].link
    loop.remove_reader(_socket_of(native.spawner).fileno())
    (pid,) = native.spawner.pids
    await _until_idle(native, pid, processes=4)  # pid 1, and those that wait
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    os.write(go_write, b"x\n" * 3)
    await _until_idle(native, pid, processes=1)
    os.close(go)
    os.close(go_write)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    loop.add_reader(_socket_of(native.spawner).fileno(), link._readable)

    for execution in spooled:
        with pytest.raises(CapacityError) as caught:
            await execution.ended
        assert caught.value.execution is Execution.EXECUTED
    assert {(await execution.ended).stdout.data for execution in full} == {bytes(400000)}
    assert native.lost == []
    assert (await native.sh(sandbox, "echo on")).stdout.data == b"on\n"
