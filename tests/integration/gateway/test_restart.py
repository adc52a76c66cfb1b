"""Services that are killed or replaced under load: clients notice nothing."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coldframe import CursorExpiredError, Sandbox, SandboxClient
from coldframe.cli import node
from coldframe.host import census
from coldframe.protocol import tracing
from coldframe.protocol.models import ExecResult
from tests.fixtures.restart import IMAGE, Services
from tests.fixtures.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
]


def _pattern(number: int, size: int) -> bytes:
    return (b"%06d " % number) * (size // 7)


GATED, SHORT = "cat /gate", "sleep 2"


def _counted(number: int, size: int, wait: str) -> str:
    """A command that notes that it ran, waits, and writes something of its own; exit code too."""
    return (
        f"echo {number} >> /ran; {wait}; "
        f"yes '{number:06d} ' | tr -d '\\n' | head -c {size // 7 * 7}; exit {number % 100}"
    )


def _assert_right(number: int, size: int, result: ExecResult) -> None:
    expected = _pattern(number, size)
    assert (result.reason, result.exit_code) == ("exit", number % 100)
    assert result.out.total_bytes == len(expected)
    assert result.out.sha256 == hashlib.sha256(expected).hexdigest()
    assert result.out.head == expected[: len(result.out.head)]
    assert result.out.tail == expected[len(expected) - len(result.out.tail) :]


def _assert_ran_once(sandboxes: list[Sandbox], count: int) -> None:
    ran: list[int] = []
    for sandbox in sandboxes:
        ran += [int(line) for line in sandbox.files.read("/ran").split()]
    assert sorted(ran) == list(range(count))


class _Burst:
    """Many commands over some sandboxes, each waited for by a thread of its own."""

    def __init__(self, client: SandboxClient, *, sandboxes: int, commands: int) -> None:
        self.sandboxes = [
            client.create_sandbox(IMAGE, memory_bytes=64 << 20) for _ in range(sandboxes)
        ]
        for sandbox in self.sandboxes:
            sandbox.exec("mkfifo /gate")
        # Some fit into an answer, some into a result, some only into a spool.
        self.sizes = [(700, 70_000, 2_100_000)[number % 3] for number in range(commands)]
        self._pool = ThreadPoolExecutor(commands)

    def begin(self) -> None:
        """Start them: each second waits for `open_gates`. The calls wait for their ends."""
        self._calls = [
            self._pool.submit(
                self.sandboxes[number % len(self.sandboxes)].exec,
                _counted(number, size, GATED if number % 40 < 20 else SHORT),
                operation_id=f"burst-{number}",
            )
            for number, size in enumerate(self.sizes)
        ]
        wait_until(lambda: self._begun() == len(self.sizes), within_s=100)
        wait_until(lambda: len(self.waiting()) >= len(self.sizes) // 2)

    def _begun(self) -> int:
        noted = [s.files.read("/ran") for s in self.sandboxes if s.files.exists("/ran")]
        return sum(len(one.split()) for one in noted)

    def open_gates(self) -> None:
        """Let those that wait come to their end."""
        for sandbox in self.sandboxes:
            sandbox.exec(": > /gate")

    def waiting(self) -> set[tuple[str, int]]:
        """Processes that wait, by sandbox."""
        return {
            (sandbox.id, process.pid)
            for sandbox in self.sandboxes
            for process in sandbox.processes()
            if process.name == "cat"
        }

    def assert_right(self) -> None:
        """Every call returned what its command did, and each command ran once."""
        for number, call in enumerate(self._calls):
            _assert_right(number, self.sizes[number], call.result(120))
        self._pool.shutdown()
        _assert_ran_once(self.sandboxes, len(self.sizes))


@pytest.mark.parametrize("times", [1, 2])
def test_killed_under_200_commands_none_is_lost_or_run_twice(
    services: Services, times: int
) -> None:
    """Of one day of training, a crash of the service must cost nothing."""
    services.start()
    with services.client() as client:
        burst = _Burst(client, sandboxes=20, commands=200)
        burst.begin()
        before = burst.waiting()
        for _ in range(times):
            services.kill()
            services.start()
        assert burst.waiting() == before
        assert len(before) == 100
        burst.open_gates()
        burst.assert_right()
        ledger = client.ledger()
        assert (ledger.created, ledger.live, ledger.balanced) == (20, 20, True)


def test_replaced_under_200_commands_none_is_lost_or_run_twice(services: Services) -> None:
    """An upgrade must not have to wait until nobody trains."""
    process = services.start("--listen", "127.0.0.1:0")
    with services.client() as client:
        burst = _Burst(client, sandboxes=20, commands=200)
        burst.begin()
        before = burst.waiting()
        upgraded = services.command("node", "upgrade", "--json")
        assert (upgraded.returncode, process.poll()) == (0, None), upgraded.stderr
        assert "coldframe" in json.loads(upgraded.stdout)
        assert burst.waiting() == before
        burst.open_gates()
        burst.assert_right()
        assert client.ledger().balanced
    assert services.log.read_text().count("serving unix:") == 2


def test_service_takes_over_from_the_node_that_a_client_started(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may be faster than systemd; the service must not stay away for that."""
    for name, value in services.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("COLDFRAME_URL")
    services.start("--listen", "127.0.0.1:0")
    with SandboxClient() as joined:
        sandbox = joined.create_sandbox(IMAGE)
        services.kill()
        process = sandbox.start("while ! test -e /gate; do sleep 0.05; done; echo on")
        stand_in = node.pid_of_node(services.home)
        serving = services.start("--listen", "127.0.0.1:0")
        wait_until(lambda: node.pid_of_node(services.home) == serving.pid)
        wait_until(lambda: not Path(f"/proc/{stand_in}").exists())
        sandbox.files.write("/gate", b"")
        assert process.wait().text == "on\n"
        assert node.pid_of_node(services.home) == serving.pid
        again = services.command("serve")
        assert (again.returncode, "another node serves" in again.stderr) == (1, True)


def test_node_that_ends_and_leaves_a_cgroup_is_found_by_gc(services: Services) -> None:
    """Without its directory nobody would ever know whose it is."""
    services.start()
    with services.client() as client:
        node_id = client.create_sandbox(IMAGE).info.node_id
        (base, *_) = census.node_cgroups(node_id)
        (base / "stray").mkdir()
    assert services.command("node", "stop").returncode == 0

    assert services.command("ledger").returncode == 1
    assert f"reaped cgroup {base}" in services.command("gc").stdout
    assert not census.node_cgroups(node_id)
    assert services.command("ledger").returncode == 0


def test_upgrade_that_could_not_go_on_with_the_sandboxes_leaves_the_node_alone(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new program would refuse the old spawner, and nobody would serve any more."""
    monkeypatch.setitem(services.environment, "PYTHONPATH", str(tmp_path))
    process = services.start()
    later = "import coldframe.host.wire as wire\nwire.VERSION += 1\n"
    (tmp_path / "sitecustomize.py").write_text(later)  # as if it had been installed meanwhile
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        refused = services.command("node", "upgrade")
        assert refused.returncode == 1
        assert "what keeps the sandboxes" in refused.stderr
        assert "coldframe node stop" in refused.stderr
        process.send_signal(signal.SIGHUP)  # as systemctl reload does
        said = "not upgraded: what keeps the sandboxes"
        wait_until(lambda: said in services.log.read_text())
        assert (process.poll(), sandbox.exec("echo here").text) == (None, "here\n")


def test_no_client_is_refused_while_a_service_is_replaced(services: Services) -> None:
    """Who asks once and gives up must not meet an upgrade."""
    services.start()
    stop = threading.Event()
    answers: list[bytes] = []

    def ask() -> None:
        while not stop.is_set():
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
                one.settimeout(60)
                one.connect(services.url.removeprefix("unix:"))  # never refused
                one.sendall(b"GET /v1/versions HTTP/1.1\r\nHost: localhost\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    answers.append(one.recv(4096))

    with services.client() as client, ThreadPoolExecutor(4) as pool:
        client.create_sandbox(IMAGE)  # something to be kept
        asking = [pool.submit(ask) for _ in range(4)]
        assert services.command("node", "upgrade").returncode == 0
        stop.set()
        for one in asking:
            one.result(60)
    assert answers[-1].startswith(b"HTTP/1.1 200")


def test_transitions_are_told_on_after_a_restart_and_the_cursor_of_before_is_refused(
    services: Services,
) -> None:
    """Who follows must learn that it may have missed something, and then miss nothing."""
    services.start()
    with services.client() as client:
        with tracing.traced("1" * 32):
            sandbox = client.create_sandbox(IMAGE)
        before = next(iter(client.events("oldest"))).cursor
        services.kill()
        services.start()
        with pytest.raises(CursorExpiredError) as raised:
            next(iter(client.events(before)))
        sandbox.delete()
        told = list(itertools.islice(client.events(raised.value.oldest), 3))
        assert [(one.sandbox_id, one.state, one.trace_id) for one in told] == [
            (sandbox.id, state, "1" * 32) for state in ("ready", "terminating", "deleted")
        ]
        versions = [one.version for one in told]
        assert versions == sorted(set(versions))
        assert versions[0] >= sandbox.info.version - 2
