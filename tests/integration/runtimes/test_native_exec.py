"""Commands in native sandboxes: what the seam's self-check does not ask for."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.protocol.errors import (
    ArgumentsTooLongError,
    CapacityError,
    Execution,
    InvalidRequestError,
    PathRefusedError,
    PortUnreachableError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    ShellNotFoundError,
    UserNotFoundError,
    WorkdirNotFoundError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecRequest, PtySize, Reason, SignalScope
from coldframe.runtimes.native_sandbox import NativeSandbox
from tests.fixtures.descriptors import room_for
from tests.fixtures.runtime import MakeSandbox, open_descriptors, pieces, run

MIB = 1 << 20


# --- no descriptor left -----------------------------------------------------------------


async def test_exec_whose_terminal_found_no_room_is_killed_and_typed(
    native_sandbox: NativeSandbox,
) -> None:
    """It would run on where nobody could see it, reach it or know of it."""
    request = ExecRequest(command="sleep 1000", pty=PtySize(rows=24, cols=80))
    await run(native_sandbox, "true")
    before = open_descriptors()

    with room_for(1), pytest.raises(CapacityError, match="ulimit -n") as caught:
        await native_sandbox.start_exec(request, new_operation_id())

    assert caught.value.execution is Execution.EXECUTED
    async with asyncio.timeout(60):
        while True:
            if not await native_sandbox.processes():
                break
            await asyncio.sleep(0.01)
    assert open_descriptors() == before


async def test_exec_without_room_for_its_pipes_is_not_executed(
    native_sandbox: NativeSandbox,
) -> None:
    """Neither the policy's fault nor a user that the image has not."""
    await run(native_sandbox, "true")
    for request in (ExecRequest(command="cat", stdin=b"x"), ExecRequest(command="id", user="root")):
        with room_for(0), pytest.raises(CapacityError, match="ulimit -n") as caught:
            await native_sandbox.start_exec(request, new_operation_id())
        assert caught.value.execution is Execution.NOT_EXECUTED
    with room_for(0), pytest.raises(CapacityError):
        await native_sandbox.files.stat("/bin")

    assert (await run(native_sandbox, "echo on")).stdout == b"on\n"


# --- time, trees ----------------------------------------------------------------------


async def test_exec_past_deadline_kills_daemonised_grandchildren(
    native_sandbox: NativeSandbox,
) -> None:
    """A survivor would steal CPU from the next episode on this node."""
    script = "echo hi; setsid sh -c 'sleep 1000 & sleep 1000' & (sleep 1000 &) & sleep 1000"

    result = await run(native_sandbox, script, deadline_s=1)

    assert (result.reason, result.signal, result.stdout) == (Reason.DEADLINE, 9, b"hi\n")
    assert 1 <= result.duration_s < 30
    assert await native_sandbox.kill_processes() == ()


async def test_exec_whose_child_holds_stdout_returns_and_lists_it(
    native_sandbox: NativeSandbox,
) -> None:
    """`server &` is how agents start servers."""
    result = await run(native_sandbox, "sleep 1000 & echo started")

    assert (result.reason, result.stdout) == (Reason.EXIT, b"started\n")
    # By pid and operation: it is called `sh` until it has become `sleep`.
    (left,) = [(process.pid, process.operation_id) for process in result.leftovers]
    assert left[1] == result.operation_id
    for found in (
        await native_sandbox.processes(),
        await native_sandbox.kill_processes(result.operation_id),
    ):
        assert [(process.pid, process.operation_id) for process in found] == [left]
    assert await native_sandbox.processes() == ()


async def test_processes_of_ended_execs_are_not_remembered_for_ever(
    native_sandbox: NativeSandbox,
) -> None:
    """10,000 commands in one sandbox must not cost 10,000 records."""
    for _ in range(20):
        await run(native_sandbox, "sleep 0.01 &")
    while await native_sandbox.processes():  # noqa: ASYNC110 (only the kernel knows)
        await asyncio.sleep(0.01)

    assert not native_sandbox.commands._known


async def test_processes_of_commands_that_still_start_are_listed_and_killed(
    make_sandbox: MakeSandbox,
) -> None:
    """Their starts were acknowledged: whoever ends an agent must not miss its last command."""
    sandbox = await make_sandbox(cpu=0.05)
    started = [
        await sandbox.start_exec(ExecRequest(argv=("sleep", "1000")), new_operation_id())
        for _ in range(48)
    ]
    (last,) = await sandbox.kill_processes(started[-1].operation_id)
    left = await sandbox.processes()

    assert (last.name, last.operation_id) == ("sleep", started[-1].operation_id)
    assert (await started[-1].wait()).reason == Reason.SIGNAL
    assert {one.operation_id for one in left} == {one.operation_id for one in started[:-1]}


# --- input ----------------------------------------------------------------------------


async def test_stdin_larger_than_a_pipe_to_a_command_that_never_reads_does_not_hang(
    native_sandbox: NativeSandbox,
) -> None:
    """The rest has nowhere to go; the command's end is what counts."""
    result = await asyncio.wait_for(run(native_sandbox, "exit 4", stdin=bytes(8 * MIB)), 20)

    assert result.exit_code == 4


async def test_stdin_of_many_megabytes_arrives_whole(native_sandbox: NativeSandbox) -> None:
    """In the background, as fast as the command reads."""
    data = os.urandom(4 * MIB)

    result = await run(native_sandbox, "sha256sum; cat", stdin=data)

    assert result.stdout.endswith(b"  -\n")
    assert len(result.stdout) == 64 + 4


async def test_stdin_left_open_does_not_hold_the_end_and_backpressure_is_real(
    native_sandbox: NativeSandbox,
) -> None:
    """A writer that is never told to wait fills the node's memory."""
    request = ExecRequest(command="read line; echo $line; sleep 0.2", stdin_open=True)
    running = await native_sandbox.start_exec(request, new_operation_id())
    await running.write_stdin(b"first\n")
    flood = asyncio.ensure_future(running.write_stdin(bytes(MIB)))

    result = await asyncio.wait_for(running.wait(), 20)

    assert result.stdout == b"first\n"
    with pytest.raises(BrokenPipeError):
        await flood
    with pytest.raises(BrokenPipeError):
        await running.write_stdin(b"x")


async def test_write_stdin_that_was_not_asked_for_is_refused(native_sandbox: NativeSandbox) -> None:
    """Bytes that vanish without a word are a bug to hunt for days."""
    running = await native_sandbox.start_exec(ExecRequest(command="true"), new_operation_id())

    with pytest.raises(InvalidRequestError):
        await running.write_stdin(b"x")
    await running.wait()


# --- odd bytes, missing things --------------------------------------------------------


async def test_odd_bytes_pass_unchanged_both_ways(native_sandbox: NativeSandbox) -> None:
    """Not everything is UTF-8, and truncating at a NUL is silent."""
    argument = bytes(range(1, 256))
    result = await run(native_sandbox, argv=(b"printf", b"%s", argument), env={b"\xff": b"\xfe\n"})
    assert result.stdout == argument
    assert result.request.env[b"\xff"] == b"\xfe\n"

    result = await run(native_sandbox, "cat; printf '\\000\\377'", stdin=b"\0\xfe\0")
    assert result.stdout == b"\0\xfe\0\0\xff"


async def test_many_variables_and_long_arguments_arrive(native_sandbox: NativeSandbox) -> None:
    """1,000 variables and 128 KiB of arguments are everyday in builds."""
    env = {f"NAME_{number}": "v" * 50 for number in range(1000)}
    arguments = ["x" * 1023] * 128

    result = await run(
        native_sandbox, argv=("sh", "-c", 'echo $# "$NAME_999"', "sh", *arguments), env=env
    )

    assert result.stdout == b"128 " + b"v" * 50 + b"\n"


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({"argv": ("no-such-program",)}, ProgramNotFoundError),
        ({"argv": ("/no/such/program",)}, ProgramNotFoundError),
        ({"argv": ("/etc/passwd",)}, ProgramNotExecutableError),
        ({"argv": ("/etc",)}, ProgramNotExecutableError),
        ({"command": "true", "shell": "/bin/zsh"}, ShellNotFoundError),
        ({"command": "true", "cwd": "/missing"}, WorkdirNotFoundError),
        ({"command": "true", "cwd": "/etc/passwd"}, WorkdirNotFoundError),
        ({"command": "true", "user": "nobody-here"}, UserNotFoundError),
        ({"command": "true", "user": "0:no-such-group"}, UserNotFoundError),
        ({"command": "true", "user": 70000}, UserNotFoundError),
        ({"argv": ("true", "x" * 200_000)}, ArgumentsTooLongError),
        ({"argv": ("true", *["x" * 100_000] * 50)}, ArgumentsTooLongError),
        ({"argv": ("true", "a\0b")}, InvalidRequestError),
        ({"command": "true", "env": {"A=B": "c"}}, InvalidRequestError),
        ({"command": "true", "cwd": "relative"}, InvalidRequestError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value)[:40],
)
async def test_what_cannot_be_executed_is_typed_and_leaves_no_descriptor(
    native_sandbox: NativeSandbox, request_fields: dict[str, object], expected: type[Exception]
) -> None:
    """ "Not executed" is a fact that a retry can rely on."""
    before = open_descriptors()

    with pytest.raises(expected) as caught:
        await run(native_sandbox, stdin=b"input", **request_fields)

    assert getattr(caught.value, "execution", "") == "not_executed"
    assert open_descriptors() - before == set()


# --- output ---------------------------------------------------------------------------


async def test_endless_output_costs_bounded_disk_and_is_cut_where_it_says(
    native_sandbox: NativeSandbox, tmp_path: Path
) -> None:
    """`yes` for the length of an episode would fill any disk."""
    running = await native_sandbox.start_exec(
        ExecRequest(
            command="yes 0123456789abcdef", spool_bytes=MIB, window_bytes=4096, deadline_s=1.5
        ),
        new_operation_id(),
    )
    result = await running.wait()

    assert result.reason is Reason.DEADLINE
    assert result.out.total_bytes > 8 * MIB
    assert (len(result.out.head), len(result.out.tail)) == (2048, 2048)
    assert result.out.head.startswith(b"0123456789abcdef\n")
    start = result.out.total_bytes - 2048
    line = b"0123456789abcdef\n"
    assert result.out.tail == (line * 200)[start % 17 : start % 17 + 2048]
    middle = await running.read("stdout", MIB, 100)
    assert middle.dropped_bytes == middle.offset - MIB > 0
    assert middle.data == (line * 10)[middle.offset % 17 : middle.offset % 17 + 100]
    end = await running.read("stdout", result.out.total_bytes, 100)
    assert (end.data, end.eof) == (b"", True)
    await running.forget()


async def test_streaming_reads_everything_once_in_order(native_sandbox: NativeSandbox) -> None:
    """A client that follows along must see what the command wrote."""
    request = ExecRequest(command="seq 200000; echo done >&2")
    running = await native_sandbox.start_exec(request, new_operation_id())
    data, cursor = b"", 0
    while True:
        chunk = await running.read("stdout", cursor, 100_000)
        assert (chunk.offset, chunk.dropped_bytes) == (cursor, 0)
        data, cursor = data + chunk.data, chunk.next_cursor
        if chunk.eof:
            break

    assert data == b"".join(b"%d\n" % number for number in range(1, 200001))
    result = await running.wait()
    assert result.out.total_bytes == len(data)
    assert result.stderr == b"done\n"


async def test_any_number_wait_for_output_and_give_up(native_sandbox: NativeSandbox) -> None:
    """Long polls on a quiet command are given up all day; none may use up another's place."""
    request = ExecRequest(command="read _; echo x", stdin_open=True)
    command = await native_sandbox.start_exec(request, new_operation_id())
    for _ in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(command.read("stdout", 0, MIB), 0.01)
    reads = [asyncio.ensure_future(command.read("stdout", 0, MIB)) for _ in range(20)]
    await command.write_stdin(b"\n")

    assert {(await read).data for read in reads} == {b"x\n"}
    assert (await command.wait()).exit_code == 0


async def test_output_of_leftover_is_read_after_the_end(native_sandbox: NativeSandbox) -> None:
    """A server's log goes on after the command that started it."""
    request = ExecRequest(
        command="(while [ ! -e /go ]; do sleep 0.02; done; echo later) & echo now"
    )
    running = await native_sandbox.start_exec(request, new_operation_id())
    result = await running.wait()
    assert result.stdout == b"now\n"

    await native_sandbox.files.write("/go", pieces(b""))
    chunk = await asyncio.wait_for(running.read("stdout", 4, 100), 20)

    assert chunk.data == b"later\n"


async def test_many_execs_cost_no_descriptors(native_sandbox: NativeSandbox) -> None:
    """A leak of one per command ends a node within a day; 300 show it."""
    await run(native_sandbox, "true")
    before = open_descriptors()

    for _ in range(100):
        await run(native_sandbox, "echo x")
        await run(native_sandbox, "head -c 200000 /dev/zero", stdin=b"in")
        running = await native_sandbox.start_exec(
            ExecRequest(command="cat", stdin_open=True, status_pipe=True), new_operation_id()
        )
        await running.write_stdin(b"x")
        await running.close_stdin()
        await running.wait()
        await running.forget()
    del running

    assert open_descriptors() - before == set()


# --- terminals, signals, ports --------------------------------------------------------


async def test_terminal_echoes_resizes_and_ends_by_control_d(native_sandbox: NativeSandbox) -> None:
    """What people expect of a terminal."""
    running = await native_sandbox.start_exec(
        ExecRequest(
            command="stty size; cat; stty size", pty=PtySize(rows=30, cols=90), stdin_open=True
        ),
        new_operation_id(),
    )
    assert running.pid is not None
    await running.resize(40, 100)
    await running.write_stdin(b"typed\n")
    await running.close_stdin()
    result = await asyncio.wait_for(running.wait(), 20)

    lines = result.stdout.replace(b"\r", b"").split(b"\n")
    assert lines.count(b"typed") == 2
    assert lines[-2] == b"40 100"
    assert result.stderr == b""
    await running.resize(10, 10)


async def test_sandbox_without_a_free_terminal_says_so(native_sandbox: NativeSandbox) -> None:
    """It holds 128 at most, and is told that this, and not its disk, is what is full."""
    size = PtySize(rows=24, cols=80)
    held = [
        await native_sandbox.start_exec(
            ExecRequest(command="sleep 100", pty=size, deadline_s=None), new_operation_id()
        )
        for _ in range(128)
    ]

    with pytest.raises(CapacityError, match="no terminal is free"):
        await run(native_sandbox, "true", pty=size)

    await native_sandbox.kill_processes()
    await asyncio.gather(*(one.wait() for one in held))
    assert (await run(native_sandbox, "true", pty=size)).exit_code == 0


async def test_signal_after_the_end_reaches_nobody(native_sandbox: NativeSandbox) -> None:
    """Its number may belong to somebody else by now."""
    running = await native_sandbox.start_exec(ExecRequest(command="true"), new_operation_id())
    await running.wait()

    assert await running.signal(signal.SIGKILL) == 0
    assert await running.signal(signal.SIGKILL, SignalScope.TREE) == 0
    with pytest.raises(InvalidRequestError):
        await running.signal(0)


async def test_port_is_listed_and_reached_from_within(
    make_sandbox: MakeSandbox, debian_image: Image
) -> None:
    """No route leads into a sandbox; we connect from its own loopback, on v4 and v6."""
    sandbox = await make_sandbox(image=debian_image)
    server = (
        "import socket,sys; s=socket.create_server((sys.argv[1],int(sys.argv[2])),"
        "family=socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET); print('up',flush=True);"
        " c,_=s.accept(); c.sendall(c.recv(9)); c.close()"
    )
    for address, port in (("127.0.0.1", 8001), ("::1", 8002)):
        running = await sandbox.start_exec(
            ExecRequest(argv=("python3", "-c", server, address, str(port))), new_operation_id()
        )
        assert (await running.read("stdout", 0, 10)).data == b"up\n"
        assert port in await sandbox.listening_ports()
        reader, writer = await sandbox.connect(port)
        writer.write(b"echo")
        assert await reader.read(9) == b"echo"
        writer.close()
        await running.wait()

    with pytest.raises(
        PortUnreachableError, match=r"nothing listens on it; see listening_ports\(\)"
    ):
        await sandbox.connect(8001)
    with pytest.raises(InvalidRequestError):
        await sandbox.connect(0)


# --- images of every kind -------------------------------------------------------------


async def test_image_without_shell_tmp_or_passwd_runs(
    make_sandbox: MakeSandbox, empty_image: Image
) -> None:
    """One static program is an image too."""
    sandbox = await make_sandbox(image=empty_image)

    result = await run(sandbox, argv=("/hello", "a", "b"), env={"EXIT_CODE": "3"})
    assert (result.stdout, result.exit_code) == (b"a b\n", 3)
    with pytest.raises(ShellNotFoundError):
        await run(sandbox, "true")
    assert (await run(sandbox, argv=("/hello",), user=1000)).ok
    await sandbox.files.write("/tmp/f", pieces(b"x"))
    names = {entry.name for entry in await sandbox.files.list("/")}
    assert {b"hello", b"tmp", b"dev", b"proc", b"sys"} <= names


async def test_musl_image_runs(make_sandbox: MakeSandbox, musl_image: Image) -> None:
    """Nothing of ours inside depends on the image's libc."""
    sandbox = await make_sandbox(image=musl_image)

    assert (await run(sandbox, argv=("/hello", "musl"))).stdout == b"musl\n"


# --- files seen from both sides -------------------------------------------------------


async def test_files_and_commands_see_each_others_work_with_the_same_owners(
    make_sandbox: MakeSandbox,
) -> None:
    """Ids shifted twice, or not at all, make every upload useless."""
    sandbox = await make_sandbox(user="1000:1000")
    await sandbox.files.write("/work/data", pieces(b"from outside"), mode=0o600)

    result = await run(sandbox, "stat -c '%u %g %a' /work/data /work; cat /work/data; id -u")
    assert result.stdout == b"1000 1000 600\n1000 1000 755\nfrom outside1000\n"
    script = "umask 077; mkdir /tmp/mine; echo inside > /tmp/mine/f; ln /tmp/mine/f /tmp/mine/g"
    assert (await run(sandbox, script)).ok
    found = await sandbox.files.stat("/tmp/mine/f")
    assert (found.uid, found.mode, found.nlink) == (1000, 0o600, 2)
    content = [piece async for piece in sandbox.files.read("/tmp/mine/f")]
    assert content == [b"inside\n"]


async def test_directory_of_the_image_can_be_moved(native_sandbox: NativeSandbox) -> None:
    """Overlay refuses to rename what comes from a layer; `mv` copies, and so do we."""
    before = (await run(native_sandbox, "cd /usr && find . | sort | head -50 | sha256sum")).stdout

    await native_sandbox.files.move("/usr", "/moved")

    after = (
        await run(
            native_sandbox,
            argv=("/bin/sh", "-c", "cd /moved && find . | sort | head -50 | sha256sum"),
        )
    ).stdout
    assert after == before
    assert b"usr" not in {entry.name for entry in await native_sandbox.files.list("/")}


async def test_pseudo_file_systems_are_refused_with_advice(native_sandbox: NativeSandbox) -> None:
    """`files.read("/proc/1/environ")` would ask the kernel on the host's behalf."""
    for path in ("/proc/self/status", "/sys/kernel", "/dev/null", "/dev/shm"):
        with pytest.raises(PathRefusedError, match="use exec"):
            await native_sandbox.files.stat(path)
