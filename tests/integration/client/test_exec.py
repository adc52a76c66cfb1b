"""Commands through the SDK, on both runtimes. Names in commands are relative: cwd is `/`."""

from __future__ import annotations

import threading

import pytest

from coldframe import (
    ConflictError,
    InvalidRequestError,
    NotExecutedError,
    Reason,
    Sandbox,
    SandboxClient,
)
from coldframe.protocol.errors import (
    OperationMismatchError,
    OperationNotFoundError,
    ProgramNotFoundError,
    ShellNotFoundError,
    UserNotFoundError,
    WorkdirNotFoundError,
)


def test_exec_text_and_list_give_streams_apart(sandbox: Sandbox) -> None:
    """The first thing that anybody does."""
    result = sandbox.exec("printf out; printf err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out", b"err", 3)

    result = sandbox.exec(["printf", "%s|", "a b", "$HOME", b"\xff"])
    assert result.stdout == b"a b|$HOME|\xff|"


def test_exec_options_reach_the_command(sandbox: Sandbox) -> None:
    """Each option of the contract, once, through the whole path."""
    sandbox.files.mkdir("/work")
    result = sandbox.exec(
        'read line; printf "%s %s %s" "$line" "$GIVEN" "${PWD##*/}"',
        cwd="/work",
        env={"GIVEN": "v"},
        stdin="from stdin\n",
        window_bytes=1000,
    )
    assert result.text == "from stdin v work"
    assert result.request.cwd == "/work"


def test_exec_deadline_returns_what_was_read(sandbox: Sandbox) -> None:
    """A hanging command must not lose what it said."""
    result = sandbox.exec("echo hi; sleep 60 & wait", deadline_s=1)
    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"hi\n")


def test_text_that_cannot_be_encoded_is_refused_wherever_it_goes(sandbox: Sandbox) -> None:
    """Models write halves of surrogate pairs: a harness catches ColdframeError, and no other."""
    half = "\ud83d"
    reader = sandbox.start("cat", stdin_open=True)
    with sandbox.session() as session:
        for ask in (
            lambda: sandbox.exec(half),
            lambda: sandbox.exec("cat", stdin=half),
            lambda: sandbox.exec("true", env={half: half}),
            lambda: sandbox.files.write("/text", half),
            lambda: sandbox.files.read("/" + half),
            lambda: sandbox.apply_patch(f"--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+{half}\n"),
            lambda: reader.write_stdin(half),
            lambda: session.exec(half),
        ):
            with pytest.raises(InvalidRequestError, match="not text that can be encoded"):
                ask()

        assert session.exec("echo on").stdout == b"on\n"
    reader.kill()


def test_exec_on_terminal_has_its_size(sandbox: Sandbox) -> None:
    """Full-screen programs draw by it."""
    result = sandbox.exec("stty size <&1", pty=(10, 40))
    assert result.stdout.strip() == b"10 40"


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [
        (["no-such-program"], {}, ProgramNotFoundError),
        ("true", {"shell": "/no/shell"}, ShellNotFoundError),
        ("true", {"cwd": "/no/dir"}, WorkdirNotFoundError),
        ("true", {"user": "nobody-at-all"}, UserNotFoundError),
    ],
)
def test_exec_not_started_is_typed(
    sandbox: Sandbox, command: object, options: dict[str, str], error: type[NotExecutedError]
) -> None:
    """ "It never ran" must not look like "it ran and failed"."""
    with pytest.raises(error):
        sandbox.exec(command, **options)  # type: ignore[arg-type]


def test_exec_same_operation_id_runs_once(sandbox: Sandbox) -> None:
    """A retry after a lost answer must not run `git push` twice."""
    first = sandbox.exec("echo x >> ran; cat ran", operation_id="once")
    again = sandbox.exec("echo x >> ran; cat ran", operation_id="once")

    assert first == again
    assert sandbox.files.read("/ran") == b"x\n"
    with pytest.raises(OperationMismatchError):
        sandbox.exec("true", operation_id="once")


def test_exec_at_another_version_is_a_conflict(sandbox: Sandbox) -> None:
    """A caller that planned for a sandbox that has moved on must hear of it."""
    version = sandbox.refresh().version
    assert sandbox.exec("true", expected_version=version).ok
    with pytest.raises(ConflictError):
        sandbox.exec("true", expected_version=version + 1)


def test_exec_many_threads_share_a_client(sandbox: Sandbox) -> None:
    """A harness calls tools from a pool; each call must get its own output."""
    results: dict[int, bytes] = {}

    def call(number: int) -> None:
        results[number] = sandbox.exec(f"echo {number}").stdout

    threads = [threading.Thread(target=call, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: b"%d\n" % i for i in range(12)}


# --- streams --------------------------------------------------------------------------


def test_stream_yields_output_while_the_command_runs(sandbox: Sandbox) -> None:
    """An interactive harness shows progress; waiting for the end would defeat it."""
    stream = sandbox.stream(
        "echo first; until [ -e go ]; do sleep 0.02; done; echo last >&2; exit 4"
    )
    got = []
    for chunk in stream:
        got.append((chunk.stream, chunk.data))
        if chunk.data == b"first\n":
            sandbox.files.write("/go", b"")
    assert got == [("stdout", b"first\n"), ("stderr", b"last\n")]
    assert stream.result.exit_code == 4


def test_stream_left_early_kills_the_command(sandbox: Sandbox) -> None:
    """Nobody reads on: `yes` would run for ever."""
    with sandbox.stream("yes", deadline_s=None) as stream:
        assert next(iter(stream)).data.startswith(b"y\n")
    process = sandbox.attach(stream.operation_id)
    assert process.wait().signal == 9
    with pytest.raises(InvalidRequestError, match="iterated"):
        _ = stream.result


def test_stream_loop_left_early_kills_the_command(sandbox: Sandbox) -> None:
    """`break` is how loops are left; the stream's object may live on."""
    stream = sandbox.stream("yes", deadline_s=None)
    for chunk in stream:
        assert chunk.data.startswith(b"y\n")
        break
    assert sandbox.attach(stream.operation_id).wait().signal == 9


def test_stream_ends_with_the_command_not_with_its_pipes(sandbox: Sandbox) -> None:
    """A daemon that holds stdout would hold the loop for as long as it lives."""
    stream = sandbox.stream("sleep 60 & echo done")
    assert b"".join(chunk.data for chunk in stream) == b"done\n"
    assert stream.result.exit_code == 0
    assert len(stream.result.leftovers) == 1
    sandbox.kill_processes()


def test_stream_gives_exactly_the_bytes_of_the_result(sandbox: Sandbox) -> None:
    """The sum of the chunks is the stream: none lost, none twice, at the end above all."""
    stream = sandbox.stream(["seq", "1", "200000"])
    whole, cursor = b"", 0
    for chunk in stream:
        assert chunk.offset == cursor
        cursor = chunk.next_cursor
        whole += chunk.data
    assert len(whole) == stream.result.out.total_bytes
    assert whole.endswith(b"\n200000\n")


# --- background -----------------------------------------------------------------------


def test_process_is_driven_from_outside(sandbox: Sandbox) -> None:
    """stdin, poll, cursors and the end of a command in the background."""
    process = sandbox.start(["cat"], stdin_open=True)
    assert process.poll() is None
    process.write_stdin("one\n")
    first = process.read("stdout")
    assert first.data == b"one\n"
    process.write_stdin(b"two\n")
    assert process.read("stdout", first.next_cursor).data == b"two\n"
    process.close_stdin()

    assert process.wait().exit_code == 0
    assert process.poll() == process.wait()
    assert b"".join(c.data for c in process) == b"one\ntwo\n"
    assert b"".join(c.data for c in process.output({"stdout": 4})) == b"two\n"


def test_process_has_no_deadline_unless_given(sandbox: Sandbox) -> None:
    """A server must not die after the default of a foreground command."""
    process = sandbox.start("sleep 60")
    assert process.kill().request.deadline_s is None


def test_process_signal_by_name_reaches_its_group(sandbox: Sandbox) -> None:
    """A trap in the command must see the signal that was named."""
    process = sandbox.start("trap 'echo got; exit 5' TERM; echo up; while :; do sleep 0.02; done")
    assert process.read().data == b"up\n"
    assert process.signal("TERM", "leader") == 1
    result = process.wait()
    assert (result.stdout, result.exit_code) == (b"up\ngot\n", 5)
    assert process.signal(15) == 0


def test_attach_continues_from_a_cursor(sandbox: Sandbox, request: pytest.FixtureRequest) -> None:
    """A client that lost its handle has lost nothing."""
    operation = sandbox.start("echo before; until [ -e go ]; do sleep 0.02; done; echo after")
    cursor = operation.read().next_cursor
    again = sandbox.attach(operation.operation_id)
    sandbox.files.write("/go", b"")

    assert b"".join(c.data for c in again.output({"stdout": cursor})) == b"after\n"
    with pytest.raises(OperationNotFoundError):
        sandbox.attach("never-was")


def test_process_on_a_terminal_is_resized(sandbox: Sandbox) -> None:
    """The size must follow the window that shows it."""
    process = sandbox.start("stty -echo; read x; stty size", pty=(10, 40))
    process.resize(20, 70)
    process.write_stdin("\n")
    result = process.wait()
    assert result.stdout.strip().endswith(b"20 70")


def test_exec_when_sandbox_is_deleted_ends_with_its_output(client: SandboxClient) -> None:
    """A call in flight must not hang when somebody deletes the sandbox."""
    sandbox = client.create_sandbox("x")
    stream = sandbox.stream("echo hi; sleep 60", deadline_s=None)
    got = []
    for chunk in stream:
        got.append(chunk.data)
        sandbox.delete()
    assert (got, stream.result.reason) == ([b"hi\n"], Reason.SANDBOX_GONE)


# --- processes, ports -----------------------------------------------------------------


def test_processes_and_ports_are_seen_and_killed(sandbox: Sandbox) -> None:
    """A grader must see what the agent left running, and end it."""
    server = sandbox.start(
        ["python3", "-uc",
         "import socket\n"
         "s = socket.create_server(('127.0.0.1', 0))\n"
         "print(s.getsockname()[1])\n"
         "while True:\n"
         " c = s.accept()[0]; c.sendall(b'echo ' + c.recv(100)); c.close()"]
    )  # fmt: skip
    port = int(server.read().data)

    assert port in sandbox.listening_ports()
    assert any(p.operation_id == server.operation_id for p in sandbox.processes())
    with sandbox.connect(port) as connection:
        connection.settimeout(20)
        connection.sendall(b"x" * 50)
        assert connection.makefile("rb").read() == b"echo " + b"x" * 50
    assert sandbox.kill_processes(server.operation_id)
    assert sandbox.processes() == ()
    assert server.wait().signal == 9
