"""Clients and the daemon of the machine's node, in whichever order they end and come back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.fixtures.restart import IMAGE, Services
from tests.fixtures.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(200),
]

CLIENT = f"""
import sys
from coldframe import SandboxClient
with SandboxClient() as client:
    ends, stays, later = (client.create_sandbox({IMAGE!r}) for _ in range(3))
    stays.keep()
    ends.start("sleep 600")
    print(ends.id, stays.id, later.id, flush=True)
    sys.stdin.readline()
    later.keep()
"""
RETURN_S = 2.0


class Client:
    """A process that has made three sandboxes and keeps one; a line, and it keeps one more."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.ends, self.stays, self.later = process.stdout.readline().split()


@pytest.fixture
def make_client(
    make_services: Callable[..., Services], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Services, Callable[[], Client]]]:
    """A home whose service has begun, and what starts a client of it."""
    services = make_services(COLDFRAME_RETURN_S=str(RETURN_S))
    for name, value in (
        ("HOME", str(services.home)),
        ("RUNTIME", "native"),
        ("RETURN_S", str(RETURN_S)),
    ):
        monkeypatch.setenv(f"COLDFRAME_{name}", value)
    monkeypatch.delenv("COLDFRAME_URL", raising=False)
    services.start()
    begun: list[Client] = []

    def make() -> Client:
        made = Client(
            subprocess.Popen(
                [sys.executable, "-c", CLIENT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        begun.append(made)
        return made

    yield services, make
    for client in begun:
        with client.process:
            client.process.kill()


@contextmanager
def _watching(services: Services) -> Iterator[Callable[[str], str]]:
    """Says what has become of a sandbox."""
    with services.client() as watcher:

        def state(sandbox_id: str) -> str:
            info = watcher.get_sandbox(sandbox_id).info
            return info.state if info.reason is None else info.reason

        yield state


def test_client_that_dies_while_no_service_lives_leaves_nothing(
    make_client: tuple[Services, Callable[[], Client]],
) -> None:
    """The next service hears of no end: its sandboxes would run until their leases end."""
    services, make = make_client
    dies, returns, hangs = make(), make(), make()
    for one in (dies, returns, hangs):  # else they start the next service
        one.process.send_signal(signal.SIGSTOP)
    services.kill()
    dies.process.kill()
    dies.process.wait()
    services.start()
    returns.process.send_signal(signal.SIGCONT)

    with _watching(services) as state:
        for sandbox_id in (dies.ends, dies.later):
            wait_until(lambda one=sandbox_id: state(one) == "its client has gone")
        # One that does not return in time, but whose process lives, may have a busy event loop.
        for other in (dies.stays, returns.ends, returns.later, hangs.ends, hangs.stays):
            assert state(other) == "ready"
        hangs.process.kill()
        wait_until(lambda: state(hangs.ends) == "its client has gone")
        assert state(returns.ends) == state(hangs.stays) == "ready"
        returns.process.kill()
        wait_until(lambda: state(returns.ends) == "its client has gone")


def test_what_is_kept_while_no_service_lives_stays(
    make_client: tuple[Services, Callable[[], Client]],
) -> None:
    """To keep a sandbox is a promise, whichever service was there to hear of it."""
    services, make = make_client
    client, other = make(), make()
    other.process.send_signal(signal.SIGSTOP)
    services.kill()  # the client starts the next one
    other.process.kill()
    assert client.process.communicate("\n", timeout=60) == ("", None)
    assert client.process.returncode == 0
    with _watching(services) as state:
        wait_until(lambda: state(other.ends) == "its client has gone")
        assert state(client.later) == state(client.stays) == "ready"
        assert state(client.ends) == "deleted"
    assert services.command("node", "stop", "--now").returncode == 0
