"""Sessions of a service: found again by who lost theirs, also by the service after a restart."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from coldframe import (
    Sandbox,
    SandboxClient,
    Session,
    SessionEndedError,
)
from coldframe.protocol.errors import (
    OperationExpiredError,
    OperationMismatchError,
    OperationNotFoundError,
)
from tests.fixtures.census import processes_of
from tests.fixtures.restart import IMAGE, Services
from tests.fixtures.service import Service
from tests.fixtures.waiting import wait_until


def test_session_is_found_again_by_its_id(service: Service, served: Sandbox) -> None:
    """A worker that was killed must not cost the episode its shell."""
    session = served.session(operation_id="shell")
    session.exec("x=kept; cd /")
    assert [one.id for one in served.sessions()] == ["shell"]

    with SandboxClient(url=service.unix) as other:
        again = other.get_sandbox(served.id).attach_session("shell")
        assert again.exec("echo $x; pwd").stdout == b"kept\n/\n"
        assert other.get_sandbox(served.id).session(operation_id="shell").exec("echo $x").ok
        again.close()

    assert session.refresh().ended is not None
    assert served.sessions() == ()
    with pytest.raises(SessionEndedError):
        session.exec("true")
    with pytest.raises(OperationNotFoundError, match="no session has the id 'none'"):
        served.attach_session("none")


def test_session_command_with_the_same_id_runs_once(served: Sandbox) -> None:
    """Who asks again after a lost answer must not append twice."""
    with served.session() as session, served.session() as other:
        first = session.exec("echo x >> ran; wc -l < ran", operation_id="once")
        assert session.exec("echo x >> ran; wc -l < ran", operation_id="once") == first
        assert first.stdout.strip() == b"1"
        with pytest.raises(OperationMismatchError):
            session.exec("true", operation_id="once")
        with pytest.raises(OperationMismatchError):
            other.exec("echo x >> ran; wc -l < ran", operation_id="once")


def test_session_command_is_read_while_it_runs_and_after(served: Sandbox) -> None:
    """What a model waits for is shown as it comes, without what came before it."""
    with served.session() as session, ThreadPoolExecutor(1) as pool:
        session.exec("echo before; mkfifo gate")
        running = pool.submit(
            session.exec, "echo begun; cat gate; echo end >&2", operation_id="followed"
        )
        wait_until(lambda: session.refresh().running == "followed")
        command = served.attach("followed")
        chunk = command.read("stdout", 0)
        assert (chunk.offset, chunk.data, chunk.eof) == (0, b"begun\n", False)
        threading.Timer(0.1, served.exec, ["echo open > gate"]).start()
        parts: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        for chunk in command:
            parts[chunk.stream] += chunk.data
        assert parts == {"stdout": b"begun\nopen\n", "stderr": b"end\n"}
        assert running.result().stdout == parts["stdout"]
        session.exec("echo after")
        assert command.read("stdout", 6).data == b"open\n"
        assert command.read("stdout", 11).eof


def test_session_command_is_cancelled_and_the_shell_stays(
    served: Sandbox, caller: httpx.Client
) -> None:
    """To stop one command must not cost what was set before."""
    with served.session() as session, ThreadPoolExecutor(1) as pool:
        session.exec("x=kept")
        running = pool.submit(session.exec, "echo begun; sleep 60; echo AFTER", operation_id="long")
        wait_until(lambda: session.refresh().running == "long")
        assert served.attach("long").read("stdout", 0).data == b"begun\n"
        told = caller.post("/v1/execs/long/cancel").json()
        assert (told["reason"], told["signal"], told["exit_code"]) == ("signal", 9, None)
        assert running.result(30).stdout == b"begun\n"
        assert session.exec("echo $x").stdout == b"kept\n"


def test_session_by_plain_http(served: Sandbox, caller: httpx.Client) -> None:
    """Who has no SDK has the same shell, by the document alone."""
    made = caller.post(f"/v1/sandboxes/{served.id}/sessions", json={"operation_id": "plain"})
    assert (made.status_code, made.json()["id"], made.json()["ended"]) == (201, "plain", None)
    asked = {"command": "sleep 1; exit 3", "operation_id": "leaves"}
    later = caller.post("/v1/sessions/plain/execs?wait_s=0.05", json=asked)
    assert (later.status_code, later.json()["operation_id"]) == (202, "leaves")
    told = caller.post("/v1/sessions/plain/execs", json=asked).json()
    assert (told["result"]["exit_code"], told["ended"]["exit_code"]) == (3, 3)
    assert caller.get("/v1/execs/leaves").json() == told["result"]
    refused = caller.post("/v1/sessions/plain/execs", json={"command": "true"})
    assert (refused.status_code, refused.json()["code"]) == (409, "session_ended")
    assert caller.delete("/v1/sessions/plain").json()["ended"]["exit_code"] == 3


def _pending(pool: ThreadPoolExecutor, session: Session) -> Callable[[], bytes]:
    """Begin what waits for the gate, and then writes much; return what gives all of it."""
    words = "echo begun; cat /gate; yes 0123456 | head -c 3000000; echo end >&2; (exit 7)"
    running = pool.submit(session.exec, words, operation_id="pending", window_bytes=4 << 20)
    wait_until(lambda: session.refresh().running == "pending")

    def result() -> bytes:
        told = running.result(120)
        assert (told.exit_code, told.stderr) == (7, b"end\n")
        assert told.out.sha256 == hashlib.sha256(told.stdout).hexdigest()
        return told.stdout

    return result


@pytest.mark.root
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize("how", ["killed", "upgraded"])
def test_session_goes_on_after_a_restart(
    services: Services, debian_image: object, shell: str, how: str
) -> None:
    """A crash of the service must not cost an episode its shell, nor run a command twice."""
    del debian_image
    services.start()
    with services.client() as client, ThreadPoolExecutor(1) as pool:
        sandbox = client.create_sandbox("debian:bookworm", memory_bytes=128 << 20)
        sandbox.exec("mkfifo /gate")
        session = sandbox.session(shell, operation_id="shell")
        session.exec("x=kept; echo first >> /ran; cd /tmp", operation_id="first")
        result = _pending(pool, session)
        for _ in range(2):
            if how == "killed":
                services.kill()
                services.start()
            else:
                assert services.command("node", "upgrade").returncode == 0
        assert session.refresh().running == "pending"
        with pytest.raises(OperationExpiredError):
            session.exec("x=kept; echo first >> /ran; cd /tmp", operation_id="first")
        sandbox.exec("echo open > /gate")
        assert result() == b"begun\nopen\n" + (b"0123456\n" * 375_000)
        assert session.exec("echo $?; echo $x; pwd; cat /ran").stdout == b"7\nkept\n/tmp\nfirst\n"


@pytest.mark.root
def test_session_answer_that_was_lost_with_the_service_is_given_again(services: Services) -> None:
    """The last command had ended, and its answer never came: it must not run again."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        session = sandbox.session()
        session.exec("echo earlier")
        other = sandbox.session()
        assert other.exec("x=other").ok
        # Longer than what is noted in a frame.
        words = f"echo ran >> /ran; seq 1 20000; echo err >&2; (exit 9) # {'x' * 200_000}"
        first = session.exec(words, operation_id="last", window_bytes=1000)
        services.kill()
        services.start()
        assert session.exec(words, operation_id="last", window_bytes=1000) == first
        assert session.exec("echo $?; cat /ran").stdout == b"9\nran\n"
        assert other.exec("echo $x").stdout == b"other\n"
        session.exec("exit 4")
        services.kill()
        services.start()
        ended = sandbox.attach_session(session.operation_id).ended
        assert ended is not None
        assert ended.exit_code == 4


@pytest.mark.root
def test_session_command_ends_at_its_deadline_while_no_service_lives(services: Services) -> None:
    """What spins on for as long as nobody comes back takes the machine from everybody else."""
    services.start()
    with services.client() as client, ThreadPoolExecutor(2) as pool:
        sandbox, other = client.create_sandbox(IMAGE), client.create_sandbox(IMAGE)
        late, done = sandbox.session(), other.session()
        done.exec("x=kept")
        in_time = "sleep 3; echo in time; (exit 7)"
        running = [
            pool.submit(done.exec, in_time, deadline_s=20, operation_id="in-time"),
            pool.submit(late.exec, "sleep 600; echo never", deadline_s=8, operation_id="late"),
        ]
        wait_until(lambda: late.refresh().running == "late")
        wait_until(lambda: done.refresh().running == "in-time")
        services.kill()
        wait_until(lambda: len(processes_of(sandbox.id)) == 1)  # pid 1 alone
        assert len(processes_of(other.id)) == 2  # and the shell
        services.start()

        told, spun = (one.result(60) for one in running)
        assert (told.reason, told.exit_code, told.text) == ("exit", 7, "in time\n")
        assert (spun.reason, spun.signal, spun.text) == ("deadline", 9, "")
        assert done.exec("echo $? $x").text == "7 kept\n"
        with pytest.raises(SessionEndedError, match="deadline"):
            late.exec("true")
