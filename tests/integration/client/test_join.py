"""The machine's node: joined by whoever is there, started by whoever is first, gone when idle."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coldframe import (
    AsyncSandboxClient,
    CapabilityError,
    InvalidRequestError,
    Sandbox,
    SandboxClient,
)
from coldframe.protocol import places, wire
from coldframe.protocol.errors import (
    NotPermittedError,
    SandboxStateError,
    ServiceUnreachableError,
    VersionMismatchError,
)
from tests.fixtures.waiting import wait_until

WORKERS = 20
IDLE_S = 2.0
BURST = f"""
import json, os, sys, traceback
import coldframe.client._machine, coldframe.client._remote
from coldframe import SandboxClient

def work(number):
    with SandboxClient() as client:
        with client.create_sandbox("any") as sandbox:
            said = sandbox.exec(["echo", str(number)]).text.strip()
            os.write(1, (json.dumps([sandbox.id.split("-")[1], said]) + chr(10)).encode())
        os.write(served, b".")
        os.read(all_served, 1)  # a node that the first left alone for long would leave

go, start = os.pipe()
count, served = os.pipe()
all_served, release = os.pipe()
for number in range({WORKERS}):
    if os.fork() == 0:
        os.close(start)
        os.close(release)
        os.read(go, 1)  # the end of file reaches all of them at once
        try:
            work(number)
        except BaseException:
            traceback.print_exc()
            os.write(served, b".")
            os._exit(1)
        os._exit(0)
os.close(start)
for _ in range({WORKERS}):
    os.read(count, 1)
os.close(release)
sys.exit(any(os.wait()[1] for _ in range({WORKERS})))
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of the fake runtime, whose node has gone by the end of the test."""
    # Whichever pytest starts next closes the directories of all of them to other users.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield from _home_at(Path(directory) / "home", monkeypatch)


def _home_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COLDFRAME_HOME", str(home))
    monkeypatch.setenv("COLDFRAME_RUNTIME", "fake")
    monkeypatch.setenv("COLDFRAME_IDLE_EXIT_S", str(IDLE_S))
    monkeypatch.delenv("COLDFRAME_URL", raising=False)
    yield home
    with contextlib.suppress(OSError):
        os.kill(_pid_of_node(home), signal.SIGTERM)
    _wait_until_left(home)
    log = places.log_of(home)
    assert not log.exists() or "Traceback" not in log.read_text(), log.read_text()


def _wait_until_left(home: Path) -> None:
    lock = places.socket_of(home).with_name("node.sock.lock")
    deadline = time.monotonic() + 30
    while lock.exists():
        with lock.open() as held, contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        assert time.monotonic() < deadline, places.log_of(home).read_text()
        time.sleep(0.05)
    assert not places.socket_of(home).exists()


def _burst() -> set[str]:
    """Let processes come at once; return the nodes that they were on."""
    ran = subprocess.run(
        [sys.executable, "-c", BURST], check=False, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert sorted(int(said) for _, said in answers) == list(range(WORKERS))
    return {node for node, _ in answers}


def _pid_of_node(home: Path) -> int:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as one:
        with places.address_of(places.socket_of(home)) as address:
            one.connect(address)
        return int.from_bytes(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")


@pytest.mark.parametrize("round_", range(3))
def test_twenty_processes_at_once_make_one_node(home: Path, round_: int) -> None:
    """Worker processes of a trainer all start in the same moment."""
    assert len(_burst()) == 1


def test_twenty_processes_find_the_socket_of_a_killed_node(home: Path) -> None:
    """What a killed node left must neither be joined nor be in the way."""
    with SandboxClient() as client:
        before = client.create_sandbox("any").id.split("-")[1]
        os.kill(_pid_of_node(home), signal.SIGKILL)
        nodes = _burst()
    assert places.socket_of(home).exists()
    assert len(nodes) == 1
    assert before not in nodes


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_twenty_processes_meet_a_node_that_is_leaving(home: Path, after_s: float) -> None:
    """Whoever comes at the worst moment starts the next one, together with the others."""
    with SandboxClient() as client:
        client.ledger()
        leaving = _pid_of_node(home)
    os.kill(leaving, signal.SIGTERM)
    time.sleep(after_s)

    assert len(_burst()) == 1


async def test_clients_come_and_go_while_nodes_leave(home: Path) -> None:
    """Leaving when idle and joining race; nobody may see it."""
    nodes = set()

    async def visit(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with AsyncSandboxClient() as client, await client.create_sandbox("any") as sandbox:
            nodes.add(sandbox.id.split("-")[1])
            assert (await sandbox.exec("echo x")).stdout == b"x\n"

    for after_s in (0.0, 0.9, 1.0, 1.1, 1.2):  # it looks four times a second whether it may leave
        await asyncio.sleep(after_s * IDLE_S)
        await asyncio.gather(*(visit(delay_s) for delay_s in (0.0, 0.02, 0.05)))
    _wait_until_left(home)
    await visit(0.0)
    assert len(nodes) > 1


def test_node_stays_for_a_client_and_for_a_sandbox_and_leaves_after_both(home: Path) -> None:
    """A client that thinks for an hour must find its node again; a sandbox needs no client."""
    with SandboxClient() as client:
        client.ledger()
        node = _pid_of_node(home)
        time.sleep(2 * IDLE_S)  # in which it would leave, and does not
        sandbox = client.create_sandbox("any")
        sandbox.keep()
    time.sleep(2 * IDLE_S)
    assert _pid_of_node(home) == node

    with SandboxClient() as client:
        client.delete_sandbox(sandbox.id)
    _wait_until_left(home)
    wait_until(lambda: not Path(f"/proc/{node}").exists())  # its last step after the lock


MAKES_TWO = """
import sys
from coldframe import SandboxClient
client = SandboxClient()
lost, kept = client.create_sandbox("any"), client.create_sandbox("any")
kept.keep()
lost.exec("touch here")
process = lost.start("sleep 300")
print(lost.id, kept.id, flush=True)
sys.stdin.read()
"""


def test_sandbox_of_a_killed_client_is_kept_to_be_read_and_then_ends(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers are killed all the time; two hours of memory each would fill the machine."""
    monkeypatch.setenv("COLDFRAME_QUARANTINE_S", "2")
    with SandboxClient() as watcher:
        watcher.ledger()
        with subprocess.Popen(
            [sys.executable, "-c", MAKES_TWO],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdout is not None
            lost_id, kept_id = client.stdout.readline().split()
            time.sleep(0.5)
            assert watcher.get_sandbox(lost_id).info.state == "ready"
            client.kill()
        wait_until(lambda: watcher.get_sandbox(lost_id).info.kept_until is not None)
        lost = watcher.get_sandbox(lost_id)
        assert lost.info.reason == "its client has gone"
        with pytest.raises(SandboxStateError, match=r"its client has gone; it can be read for \d"):
            lost.exec("true")
        assert lost.files.exists("/here")
        wait_until(lambda: watcher.get_sandbox(lost_id).info.ended_at is not None)
        assert watcher.get_sandbox(lost_id).info.reason == "its client has gone"
        assert watcher.get_sandbox(kept_id).info.state == "ready"
        watcher.delete_sandbox(kept_id)


MAKES_MANY = """
import threading
from coldframe import SandboxClient
client = SandboxClient()

def work():
    while True:
        client.create_sandbox("any")
        print(flush=True)

for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
threading.Event().wait()
"""


def test_client_killed_while_it_creates_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made for it and it never heard of would stay until its lease ends, hours later."""
    monkeypatch.setenv("COLDFRAME_QUARANTINE_S", "0.1")
    with SandboxClient() as watcher:
        watcher.ledger()
        for _ in range(3):
            with subprocess.Popen(
                [sys.executable, "-c", MAKES_MANY], stdout=subprocess.PIPE
            ) as client:
                assert client.stdout is not None
                client.stdout.readline()
                client.kill()
        wait_until(lambda: watcher.ledger().live == 0)
        assert watcher.ledger().expired >= 3


def test_create_of_a_client_that_has_gone_or_comes_late_ends_with_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its presence and its creates are two connections, which come and end in any order."""
    monkeypatch.setenv("COLDFRAME_QUARANTINE_S", "300")
    with SandboxClient() as watcher:
        watcher.ledger()
        transport = httpx.HTTPTransport(uds=str(places.socket_of(home)))
        with httpx.Client(transport=transport, base_url="http://node") as http:

            def create(name: str) -> Sandbox:
                headers = {"Coldframe-Presence": name}
                made = http.post("/v1/sandboxes", json={"image": "any"}, headers=headers)
                return watcher.get_sandbox(made.raise_for_status().json()["id"])

            early = create("client-1")
            assert early.info.state == "ready"
            _come_and_go(home, "client-1")
            wait_until(lambda: watcher.get_sandbox(early.id).info.kept_until is not None)
            late = create("client-1")
            assert watcher.get_sandbox(late.id).info.reason == "its client has gone"
            other = create("client-2")
            assert watcher.get_sandbox(other.id).info.state == "ready"
            for sandbox in (early, late, other):
                watcher.delete_sandbox(sandbox.id)


def _come_and_go(home: Path, name: str) -> None:
    """Be there, and be killed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(places.socket_of(home)))
        connection.sendall(
            b"POST /v1/presence HTTP/1.1\r\nHost: node\r\nTransfer-Encoding: chunked\r\n"
            b"Coldframe-Presence: %b\r\n\r\n1\r\n\n\r\n" % name.encode()
        )


async def test_client_that_does_something_else_loses_nothing(home: Path) -> None:
    """A training step may block the event loop for minutes; the process is there all the same."""
    async with AsyncSandboxClient() as client, await client.create_sandbox("any") as sandbox:
        await asyncio.sleep(0.2)
        time.sleep(2 * IDLE_S)  # noqa: ASYNC251 - that the loop stands still is the case
        assert (await sandbox.exec("echo x")).stdout == b"x\n"


FORKS = """
import gc, os, sys
from coldframe import ClientClosedError, SandboxClient
with SandboxClient() as client:
    sandbox = client.create_sandbox("any")
    for _ in range(3):
        if os.fork() == 0:
            try:
                sandbox.exec("echo from the child")
            except ClientClosedError:
                del sandbox, client
                gc.collect()
                sys.exit(0)
            os._exit(1)
        assert os.wait()[1] == 0
        assert sandbox.exec("echo from the parent").text == "from the parent\\n"
        assert sandbox.refresh().state == "ready"
"""


def test_forked_child_of_a_joined_client_disturbs_nothing(home: Path) -> None:
    """Data loaders fork; the node must not take a child's end for its parent's."""
    ran = subprocess.run(
        [sys.executable, "-c", FORKS], check=False, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_client_that_closes_leaves_what_it_kept(home: Path) -> None:
    """The last word comes before the end of the connection."""
    for _ in range(5):
        with SandboxClient() as client:
            sandbox = client.create_sandbox("any")
            sandbox.keep()
    time.sleep(0.5)
    with SandboxClient() as client:
        assert client.get_sandbox(sandbox.id).info.state == "ready"
        found = client.list_sandboxes()
        assert len(found) == 5
        for one in found:
            one.delete()


def test_node_is_of_a_session_of_its_own_and_gets_no_secrets(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the terminal of its first client must not reach it, nor that one's tokens."""
    monkeypatch.setenv("MODEL_TOKEN", "hush")
    monkeypatch.setenv("COLDFRAME_API_KEY", "cf_hush")
    with SandboxClient() as client:
        client.ledger()
        node = _pid_of_node(home)
        assert os.getsid(node) == node
        assert b"hush" not in Path(f"/proc/{node}/environ").read_bytes()
        assert Path(f"/proc/{node}/cwd").resolve() == Path("/")
    assert oct(places.log_of(home).stat().st_mode)[-3:] == "600"


def test_node_that_was_killed_is_started_again_by_who_needs_it(home: Path) -> None:
    """A client outlives its node."""
    with SandboxClient() as client:
        client.ledger()
        os.kill(_pid_of_node(home), signal.SIGKILL)
        with client.create_sandbox("any") as sandbox:
            assert sandbox.exec("echo again").stdout == b"again\n"


def test_node_that_was_stopped_is_not_started_by_its_old_clients(home: Path) -> None:
    """Whoever stops a node means it."""
    with SandboxClient() as client:
        client.ledger()
        os.kill(_pid_of_node(home), signal.SIGTERM)
        _wait_until_left(home)
        with pytest.raises(ServiceUnreachableError, match=r"node\.sock"):
            client.ledger()
    with SandboxClient() as other:
        other.ledger()


def test_client_of_another_version_is_told_what_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two virtual environments on one machine is how this happens."""
    with SandboxClient() as client:
        client.ledger()
        monkeypatch.setattr("coldframe.client._remote._VERSION", (wire.VERSION_HEADER, "99"))
        with pytest.raises(VersionMismatchError, match=r"'99'.*upgrade.*in-process"):
            SandboxClient().ledger()


def test_node_with_another_runtime_is_refused(home: Path) -> None:
    """No isolation where it was asked for would be the worst surprise."""
    with SandboxClient() as client:
        client.ledger()
        with pytest.raises(InvalidRequestError, match="'fake', not 'native'"):
            SandboxClient(runtime="native").ledger()


def test_node_that_cannot_start_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words, not a time-out."""
    monkeypatch.setenv("COLDFRAME_WORKERS", "none")
    with pytest.raises(CapabilityError, match=r"COLDFRAME_WORKERS='none'.*in-process"):
        SandboxClient().ledger()


def test_home_of_any_length_has_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a socket has 107 bytes; where a home lies is its owner's choice."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        homes = _home_at(Path(directory) / ("x" * 120) / "home", monkeypatch)
        home = next(homes)
        with SandboxClient() as client, client.create_sandbox("any") as sandbox:
            assert sandbox.exec("echo x").text == "x\n"
            asked = [sys.executable, "-m", "coldframe.cli.main", "node", "status", "--json"]
            status = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
            assert status["pid"] == _pid_of_node(home)
        beside = Path(directory) / "n.sock"
        assert next(homes, None) is None
        with (
            _serving_at(home, beside),
            SandboxClient(url=f"unix:{beside}") as client,
            SandboxClient() as same,
        ):
            assert client.create_sandbox("any").id == same.list_sandboxes()[0].id


@contextlib.contextmanager
def _serving_at(home: Path, beside: Path) -> Iterator[None]:
    """`coldframe serve --unix` for a block."""
    words = [sys.executable, "-m", "coldframe.cli.main", "serve", "--unix", str(beside)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        served = {process.stdout.readline().strip() for _ in range(2)}
        assert served == {f"serving unix:{beside}", f"serving unix:{places.socket_of(home)}"}
        try:
            yield
        finally:
            process.terminate()


AS_NOBODY = """
import os
import coldframe.client._machine, coldframe.client._remote
from coldframe import SandboxClient
from coldframe.protocol.errors import ColdframeError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    SandboxClient().ledger()
except ColdframeError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.root
@pytest.mark.parametrize("served", [True, False])
def test_user_without_rights_is_told_so(home: Path, served: bool) -> None:
    """Neither a node of root nor a home of root's is theirs."""
    home.mkdir(exist_ok=True)
    with SandboxClient() if served else contextlib.nullcontext() as client:
        if client is not None:
            client.ledger()
        said = subprocess.run(
            [sys.executable, "-c", AS_NOBODY], check=True, capture_output=True, text=True
        ).stdout
    wanted = NotPermittedError if served else CapabilityError
    assert said.startswith(wanted.__name__), said
    assert "COLDFRAME_URL=in-process" in said


def test_environment_says_in_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable says which node, for programs that one does not write oneself."""
    monkeypatch.setenv("COLDFRAME_URL", "in-process")
    with SandboxClient() as client:
        assert client.ledger().balanced
    assert not places.socket_of(home).exists()
