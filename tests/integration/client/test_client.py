"""The life of clients and sandboxes as a caller sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe import (
    AsyncSandbox,
    AsyncSandboxClient,
    CapabilityError,
    ClientClosedError,
    FileError,
    InvalidRequestError,
    Sandbox,
    SandboxClient,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxState,
)
from coldframe.client import _transfer
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import NameInUseError

WAIT_FOR_BEGUN = "until [ -e begun ]; do sleep 0.01; done"


@pytest.mark.root
@pytest.mark.usefixtures("native_client")
def test_quick_start_of_the_documentation_says_hello() -> None:
    """The first lines that anybody types, on the real thing."""
    with SandboxClient(in_process=True) as client:
        with client.create_sandbox("debian:bookworm") as sandbox:
            assert sandbox.exec("echo 'Hello'").stdout == b"Hello\n"
        ledger = client.ledger()
    assert (ledger.created, ledger.deleted, ledger.balanced) == (1, 1, True)


def test_client_finds_lists_and_deletes(client: SandboxClient) -> None:
    """By id, by name, by label; deleting twice is fine."""
    one = client.create_sandbox("x", name="one", labels={"run": "a"})
    two = client.create_sandbox("x", labels={"run": "b"})

    assert client.get_sandbox("one").id == one.id
    assert [s.id for s in client.list_sandboxes()] == [one.id, two.id]
    assert [s.id for s in client.list_sandboxes({"run": "b"})] == [two.id]
    with pytest.raises(NameInUseError):
        client.create_sandbox("x", name="one")
    client.delete_sandbox("one")
    client.delete_sandbox(one.id)
    two.delete()
    assert two.info.state is SandboxState.DELETED
    for name in ("one", "", ".", "..", "../one", f"{one.id}/execs", "\ud800"):
        with pytest.raises(SandboxNotFoundError):
            client.get_sandbox(name)
    assert client.get_sandbox(one.id).info.state is SandboxState.DELETED


def test_labels_of_any_text_are_found_again(client: SandboxClient) -> None:
    """By every way to the node; what could be mistaken for another label is refused."""
    for labels in ({"a": ""}, {"a": "b=c"}, {"ü &#%3D+": "%00\n 名"}, {"\udcff": "\udcfe"}):
        with client.create_sandbox("x", labels=labels) as sandbox:
            assert [one.id for one in client.list_sandboxes(labels)] == [sandbox.id]
    for labels in ({"a=b": "c"}, {"": "c"}, {"a": "\ud800"}):
        with pytest.raises(InvalidRequestError, match="labels: "):
            client.create_sandbox("x", labels=labels)
        with pytest.raises(InvalidRequestError, match="labels: "):
            client.list_sandboxes(labels)


def test_sandbox_refuses_after_its_end(client: SandboxClient) -> None:
    """A late call is told why."""
    with client.create_sandbox("x") as sandbox:
        assert sandbox.info.state is SandboxState.READY
    with pytest.raises(SandboxGoneError, match="deleted"):
        sandbox.exec("true")
    with pytest.raises(SandboxGoneError):
        sandbox.files.read("/etc/passwd")
    assert sandbox.refresh().state is SandboxState.DELETED


def test_sandbox_lease_is_renewed(client: SandboxClient) -> None:
    """A long episode must not lose its sandbox to the default lease."""
    sandbox = client.create_sandbox("x", ttl_s=1000)
    before = sandbox.info.expires_at
    after = sandbox.renew(5000).expires_at
    assert before is not None
    assert after is not None
    assert after > before
    assert sandbox.renew(None).expires_at is None


def test_create_with_operation_id_makes_one(client: SandboxClient) -> None:
    """A retried create must not leave a second sandbox that nobody knows."""
    one = client.create_sandbox("x", operation_id="create-1")
    again = client.create_sandbox("x", operation_id="create-1")
    assert one.id == again.id
    assert client.ledger().created == 1


def test_create_bad_limit_is_refused_before_anything(client: SandboxClient) -> None:
    """One clear sentence that names the value."""
    with pytest.raises(InvalidRequestError, match="pids"):
        client.create_sandbox("x", pids=0)
    assert client.ledger().created == 0


@pytest.mark.filterwarnings("error")
def test_closed_client_refuses(tmp_path: Path) -> None:
    """Never a hang, never an attribute error, never a warning about what was not awaited."""
    client = SandboxClient(in_process=True, runtime="fake", home=tmp_path)
    sandbox = client.create_sandbox("x")
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        sandbox.exec("true")
    with pytest.raises(ClientClosedError):
        sandbox.connect(80)
    with pytest.raises(ClientClosedError):
        client.ledger()


def test_changes_tell_what_became_of_files(sandbox: Sandbox) -> None:
    """By whatever way the node is reached, with errors of ours for what cannot be asked."""
    mark = sandbox.changes().mark
    sandbox.exec("mkdir made; echo > made/one; echo > made/two")
    found = sandbox.changes(mark, limit=2)
    made = os.fsencode(sandbox.info.workdir.rstrip("/")) + b"/made"
    assert [one.path for one in found.entries] == [made, made + b"/one"]
    assert (found.created, found.left_out) == (3, 1)
    assert sandbox.changes(mark, limit=100_000).created == 3
    for limit in (0, -1):
        with pytest.raises(InvalidRequestError, match="at least 1"):
            sandbox.changes(limit=limit)
    with pytest.raises(InvalidRequestError, match="not text that can be encoded"):
        sandbox.changes("\ud83d")
    for unknown in ("999", "../upper", "\udcff"):
        with pytest.raises(FileError, match="is not kept"):
            sandbox.changes(unknown)


def test_fingerprint_tells_states_apart(sandbox: Sandbox) -> None:
    """Two attempts of a sample must begin from the same state, provably."""
    first = sandbox.fingerprint()
    assert sandbox.fingerprint() == first
    sandbox.files.write("/new", b"x")
    second = sandbox.fingerprint()
    assert second.files != first.files
    assert second.users == first.users
    assert first.excluded


def test_interrupted_exec_kills_its_command(client: SandboxClient) -> None:
    """After Ctrl-C the command must not go on behind the caller's back."""
    sandbox = client.create_sandbox("x")
    marker = sandbox.start(WAIT_FOR_BEGUN)

    def interrupt() -> None:
        marker.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.exec("touch begun; sleep 60", operation_id="interrupted")
    thread.join()
    assert sandbox.attach("interrupted").wait().signal == 9
    assert sandbox.processes() == ()


def test_program_that_never_closes_leaves_nothing(tmp_path: Path) -> None:
    """Scripts end in the middle; sandboxes must end with them."""
    script = f"""
from coldframe import SandboxClient
client = SandboxClient(in_process=True, runtime="fake", home={str(tmp_path / "home")!r})
sandbox = client.create_sandbox("x")
print(sandbox.start("exec sleep 600").operation_id and sandbox.processes()[0].pid, flush=True)
raise SystemExit(3)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (3, b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []


@pytest.mark.root
def test_built_image_holds_what_its_dockerfile_says(
    native_client: SandboxClient, image_store: ImageStore, tmp_path: Path
) -> None:
    """A task's environment is built and used through the same client."""
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:bookworm\nWORKDIR /app\nCOPY x .\nRUN cat x > y\nENV A=1\n"
    )
    (tmp_path / "x").write_text("content\n")
    name = "test-client-build:1"
    try:
        assert native_client.build_image(name, tmp_path) == image_store.resolve(name).digest
        with native_client.create_sandbox(name) as sandbox:
            assert sandbox.exec("cat y; echo $A; pwd").stdout == b"content\n1\n/app\n"
            assert sandbox.info.workdir == "/app"
    finally:
        image_store.remove(name)


@pytest.mark.root
def test_build_takes_arguments_target_and_network(
    native_client: SandboxClient, image_store: ImageStore, tmp_path: Path
) -> None:
    """What the command line can say, the client can."""
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:bookworm AS one\nARG A\nRUN echo $A > /a; env > /env\nFROM one\nRUN false\n"
    )
    name = "test-client-build:2"
    try:
        native_client.build_image(
            name, tmp_path, build_args={"A": "given"}, target="one", network=None
        )
        with native_client.create_sandbox(name) as sandbox:
            assert sandbox.exec("cat /a").stdout == b"given\n"
            assert b"SSL_CERT_FILE" not in sandbox.exec("cat /env").stdout
    finally:
        image_store.remove(name)
    with pytest.raises(InvalidRequestError, match="network: "):
        native_client.build_image(name, tmp_path, network="not a rule")
    with pytest.raises(InvalidRequestError, match="no stage 'two'"):
        native_client.build_image(name, tmp_path, target="two")


def test_build_without_a_store_names_the_remedy(client: SandboxClient, tmp_path: Path) -> None:
    """The fake runtime has no images; the message must say what has."""
    with pytest.raises(CapabilityError, match="native"):
        client.build_image("x", tmp_path)


# --- asynchronous ---------------------------------------------------------------------


async def test_async_client_runs_commands_at_once(async_sandbox: AsyncSandbox) -> None:
    """Concurrent callers share a loop; results must not wait for each other."""
    results = await asyncio.gather(*(async_sandbox.exec(f"sleep 0.2; echo {i}") for i in range(8)))
    assert [r.stdout for r in results] == [b"%d\n" % i for i in range(8)]


async def test_async_exec_cancelled_kills_its_command(async_sandbox: AsyncSandbox) -> None:
    """`asyncio.wait_for` around a call must not leave its command running."""
    marker = await async_sandbox.start(WAIT_FOR_BEGUN)
    call = asyncio.ensure_future(
        async_sandbox.exec("touch begun; sleep 60", operation_id="cancelled")
    )
    await marker.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    result = await (await async_sandbox.attach("cancelled")).wait()
    assert result.signal == 9


async def test_async_session_cancelled_command_keeps_the_shell(async_sandbox: AsyncSandbox) -> None:
    """A harness's own time limit must not cost the session's state."""
    async with await async_sandbox.session() as session:
        await session.exec("x=kept")
        marker = await async_sandbox.start(WAIT_FOR_BEGUN)
        call = asyncio.ensure_future(
            session.exec("touch begun; sleep 60; echo AFTER", deadline_s=None)
        )
        await marker.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await session.exec("echo $x")).stdout == b"kept\n"


async def test_async_session_commands_take_turns(async_sandbox: AsyncSandbox) -> None:
    """Two tasks on one shell must not mix their commands."""
    async with await async_sandbox.session() as session:
        results = await asyncio.gather(*(session.exec(f"echo {i}; (exit {i})") for i in range(9)))
    assert [(r.stdout, r.exit_code) for r in results] == [(b"%d\n" % i, i) for i in range(9)]


async def test_async_everything_else_is_there(async_sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """One pass over the asynchronous twins of what the other tests do synchronously."""
    files = async_sandbox.files

    async def content() -> AsyncIterator[bytes]:
        yield b"1\n"
        yield b"2\n"

    await files.write("/f", content())
    assert [piece async for piece in files.iterate("/f")] == [b"1\n2\n"]
    await async_sandbox.apply_patch("--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n 1\n-2\n", root="/")
    assert await files.read("/f") == b"1\n"
    await files.download_tree("/", tmp_path / "tree")
    assert (tmp_path / "tree/f").read_bytes() == b"1\n"

    async with async_sandbox.stream("echo a; echo b >&2") as stream:
        assert sorted([chunk.data async for chunk in stream]) == [b"a\n", b"b\n"]
    assert stream.result.ok
    process = await async_sandbox.start("read x; echo got $x", stdin_open=True)
    await process.write_stdin("y\n")
    assert [chunk.data async for chunk in process] == [b"got y\n"]


async def test_async_connection_is_a_pair_of_streams(async_sandbox: AsyncSandbox) -> None:
    """Ports are reached from within."""
    server = await async_sandbox.start(
        ["python3", "-uc",
         "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
         "print(s.getsockname()[1])\nc = s.accept()[0]\nc.sendall(c.recv(9)[::-1])"]
    )  # fmt: skip
    port = int((await server.read()).data)
    reader, writer = await async_sandbox.connect(port)
    writer.write(b"abc")
    assert await reader.read() == b"cba"
    writer.close()
    assert (await server.wait()).ok


async def test_async_client_opens_lazily_and_closes_once(tmp_path: Path) -> None:
    """Without a `with` block too."""
    client = AsyncSandboxClient(in_process=True, runtime="fake", home=tmp_path)
    sandbox = await client.create_sandbox("x")
    assert (await sandbox.exec("echo x")).stdout == b"x\n"
    await client.close()
    await client.close()
    with pytest.raises(ClientClosedError):
        await sandbox.exec("true")


async def test_download_cancelled_while_its_file_is_opened_leaves_none(
    async_client: AsyncSandboxClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that opens it cannot be stopped; what it makes must not stay."""
    local = tmp_path / "local"
    local.mkdir()
    opened, cancelled = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    real = _transfer._open_beside

    def slowly(path: Path) -> object:
        file = real(path)
        loop.call_soon_threadsafe(opened.set)
        assert cancelled.wait(20)
        return file

    monkeypatch.setattr(_transfer, "_open_beside", slowly)
    async with await async_client.create_sandbox("any") as sandbox:
        await sandbox.files.write("/f", b"x")
        download = asyncio.ensure_future(sandbox.files.download("/f", local / "got"))
        await asyncio.wait_for(opened.wait(), 20)
        download.cancel()
        loop.call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await download

    assert list(local.iterdir()) == []
