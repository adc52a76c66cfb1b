"""What a service leaves, and what happens while there is none: nothing is lost or runs twice.

Each test starts real services on the native runtime, one after the other, over one home.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coldframe.cli import machine
from coldframe.client._calls import call
from coldframe.client._connection import Address
from coldframe.client._http import Http
from coldframe.host import census, orphans, wire, workers
from coldframe.host.reaping import reap_cgroups
from coldframe.protocol.errors import (
    ColdframeError,
    OperationExpiredError,
    SandboxGoneError,
    SandboxStateError,
    VersionMismatchError,
)
from coldframe.protocol.models import SandboxState
from tests.fixtures.census import processes_of
from tests.fixtures.restart import IMAGE, Services
from tests.fixtures.waiting import wait_until
from tests.integration.gateway.conftest import http

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
]


def _workers_of(services: Services) -> list[int]:
    """Pids of the spawner's workers: the parents of all pid 1."""
    parents = set()
    for pid, _ in census.sandbox_processes():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        named = census.sandbox_of(pid)
        if named is not None and (services.home / "nodes" / named[0]).exists():
            parent = int(words[1])
            if Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[1:2] == [b"spawner"]:
                parents.add(parent)
    return sorted(parents)


def test_what_ends_while_no_service_lives_ends_as_it_should(
    make_services: Callable[..., Services],
) -> None:
    """Deadlines, leases and deaths do not wait for somebody who comes back."""
    services = make_services(COLDFRAME_QUARANTINE_S="0.2")
    services.start()
    with services.client() as client:
        stays, leased, dies = (client.create_sandbox(IMAGE) for _ in range(3))
        stays.exec("mkfifo /gate")
        ends = stays.start("echo before; read _ < /gate; echo after", stdin_open=True)
        quick = stays.start("sleep 8; echo done; exit 7")
        late = stays.start("echo begun; sleep 600", deadline_s=8)
        lapsing = leased.start("echo begun; sleep 600", deadline_s=None)
        dying = dies.start("echo begun; sleep 600", deadline_s=None)
        for command in (late, lapsing, dying):
            assert command.read().data == b"begun\n"
        versions = {one.id: one.refresh().version for one in (stays, leased, dies)}
        leased.renew(5.0)
        services.kill()
        os.kill(processes_of(dies.id)[0], signal.SIGKILL)
        wait_until(lambda: not processes_of(dies.id))
        wait_until(lambda: len(processes_of(leased.id)) == 1)  # pid 1 alone
        wait_until(lambda: len(processes_of(stays.id)) == 2)  # and `ends`

        services.start()
        assert (quick.wait().reason, quick.wait().exit_code) == ("exit", 7)
        assert quick.wait().text == "done\n"
        assert (late.wait().reason, late.wait().text) == ("deadline", "begun\n")
        assert (dying.wait().reason, dying.wait().text) == ("sandbox_gone", "begun\n")
        assert (lapsing.wait().reason, lapsing.wait().text) == ("sandbox_gone", "begun\n")
        assert ends.poll() is None
        assert stays.exec("echo go > /gate").exit_code == 0
        assert ends.wait().text == "before\nafter\n"

        assert dies.refresh().state is SandboxState.LOST
        wait_until(lambda: leased.refresh().state is SandboxState.DELETED)
        assert leased.refresh().expired
        for one in (stays, leased, dies):
            assert one.refresh().version >= versions[one.id]
        with pytest.raises(SandboxGoneError):
            dies.exec("true")
        ledger = client.ledger()
        assert (ledger.created, ledger.expired, ledger.lost, ledger.live) == (3, 1, 1, 1)
        assert ledger.balanced


def test_answers_are_the_first_ones_across_a_restart(
    make_services: Callable[..., Services],
) -> None:
    """Who lost the first answer, and asks the next service, must not run anything again."""
    services = make_services(COLDFRAME_RESULT_COUNT="4")
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE, labels={"a": "b"})
        first = sandbox.exec("echo ran >> /ran; date +%N", operation_id="once")
        with pytest.raises(ColdframeError) as missing:
            sandbox.exec(["/no/such"], operation_id="never")
        made = _create(services, "made", {"image": IMAGE})
        ended = _create(services, "ended", {"image": IMAGE})
        client.delete_sandbox(ended["id"])
        services.kill()
        services.start()

        again = sandbox.exec("echo ran >> /ran; date +%N", operation_id="once")
        assert again == first
        assert sandbox.files.read("/ran") == b"ran\n"
        with pytest.raises(type(missing.value), match="no program"):
            sandbox.exec(["/no/such"], operation_id="never")
        assert _create(services, "made", {"image": IMAGE}) == made
        assert _create(services, "ended", {"image": IMAGE}) == ended
        with pytest.raises(SandboxGoneError, match="was deleted"):
            client.get_sandbox(ended["id"]).exec("true")
        assert client.ledger().created == 3

        for number in range(5):
            sandbox.exec("true", operation_id=f"other-{number}")
        services.kill()
        services.start()
        with pytest.raises(OperationExpiredError):
            sandbox.exec("echo ran >> /ran; date +%N", operation_id="once")
        assert sandbox.files.read("/ran") == b"ran\n"


def _create(services: Services, key: str, spec: dict[str, object]) -> dict[str, object]:
    async def asked() -> dict[str, object]:
        unix = Path(services.url.removeprefix("unix:"))
        http = Http(Address("localhost", unix=unix), [])
        body, headers = json.dumps(spec).encode(), [("Idempotency-Key", key)]
        answer = await call(http, "POST", "/v1/sandboxes", body, headers, known=True)
        http.close()
        return dict(json.loads(answer.body))

    return asyncio.run(asked())


def test_stream_that_is_read_meanwhile_misses_no_byte(services: Services) -> None:
    """Whoever shows output as it comes goes on where it was, also with what came meanwhile."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        stream = sandbox.stream("for i in $(seq 1 60); do seq $i 20000; sleep 0.1; done")
        got, restarts = b"", 0
        for chunk in stream:
            got += chunk.data
            if restarts < 2 and len(got) > (restarts + 1) * 500_000:
                services.kill()
                services.start()
                restarts += 1
        expected = b"".join(
            b"".join(b"%d\n" % number for number in range(start, 20001)) for start in range(1, 61)
        )
        assert restarts == 2
        assert got == expected
        assert stream.result is not None
        assert stream.result.out.sha256 == hashlib.sha256(expected).hexdigest()


def test_last_words_of_leftovers_are_kept_for_the_next_service(services: Services) -> None:
    """What a command left running may write its last while nobody serves."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        first, second = (
            sandbox.start(f"(while [ ! -e {name} ]; do sleep 0.1; done; echo late) & echo early")
            for name in ("soon", "later")
        )
        for command in (first, second):
            assert command.wait().text == "early\n"
        sandbox.start("sleep 2; touch soon").read(wait=False)
        services.kill()
        wait_until(lambda: len(processes_of(sandbox.id)) == 3)  # pid 1, what waits, and its sleep

        services.start()
        assert first.read().data == b"early\nlate\n"
        assert sandbox.exec("touch later").exit_code == 0
        wait_until(lambda: len(processes_of(sandbox.id)) == 1)
        assert second.read().data == b"early\nlate\n"


def test_command_of_before_a_restart_is_cancelled_with_all_that_it_started(
    services: Services,
) -> None:
    """Who asks a new service to stop what it never started must not be told of a success."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        words = "(setsid sh -c 'echo daemon; sleep 300' &); echo begun; sleep 300"
        running = sandbox.start(words, operation_id="runs")
        left = sandbox.exec("setsid sleep 300 >/dev/null 2>&1 & echo left", operation_id="left")
        come = 0
        while come < len(b"daemon\nbegun\n"):
            come = running.read("stdout", come).next_cursor
        services.kill()
        services.start()
        with http(services.url) as caller:
            told = [caller.post("/v1/execs/runs/cancel").json() for _ in range(2)]
            assert told[0] == told[1]
            assert (told[0]["reason"], told[0]["signal"]) == ("signal", 9)
            after = caller.post("/v1/execs/left/cancel").json()
            assert after["ended_at"] == left.ended_at
        assert sorted(running.wait().stdout.split()) == [b"begun", b"daemon"]
        assert sandbox.processes() == ()


def test_input_terminals_and_shells_go_on(services: Services) -> None:
    """A command must see neither an end of its input nor a hang-up because a service died."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        adder = sandbox.start("cat; echo end", stdin_open=True)
        adder.write_stdin("one\n")
        terminal = sandbox.start(["sh"], pty=(30, 100))
        terminal.write_stdin("x=seven; stty size\n")
        shell = sandbox.session()
        shell.exec("cd /tmp; y=eight")
        large = bytes(range(256)) * 4096
        hashed = sandbox.start("sleep 3; sha256sum", stdin=large)
        for _ in range(2):
            services.kill()
            services.start()

        adder.write_stdin("two\n")
        adder.close_stdin()
        assert adder.wait().text == "one\ntwo\nend\n"
        terminal.resize(40, 120)
        terminal.write_stdin("echo $x; stty size; exit 3\n")
        ended = terminal.wait()
        assert ended.exit_code == 3
        assert b"30 100" in ended.stdout
        assert ended.stdout.split()[-5:] == [b"seven", b"40", b"120"] or b"seven" in ended.stdout
        assert b"40 120" in ended.stdout
        assert shell.exec("echo $PWD $y; false").text == "/tmp eight\n"
        assert shell.exec("(exit 9)").exit_code == 9
        assert (
            hashed.wait().text.split()[0]
            == (sandbox.exec("sha256sum", stdin=large).text.split()[0])
        )


def test_commands_that_run_are_listed_with_their_true_start(services: Services) -> None:
    """Who looks for what hangs since yesterday must not read that it began with the service."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        for odd in ({}, {"env": {"A": "b"}}):  # noted in another form
            sandbox.start("sleep 100", **odd)
        sandbox.session().exec("true")
        wait_until(lambda: all(one.started_at for one in sandbox.commands()))
        before = sandbox.commands(), sandbox.sessions()
        services.kill()
        services.start()

        assert (sandbox.commands(), sandbox.sessions()) == before


@pytest.mark.parametrize("storage", ["btrfs", "directory", "tmpfs"])
def test_what_was_written_is_there_and_new_ones_are_made(
    make_services: Callable[..., Services], storage: str
) -> None:
    """Each kind of storage is held by something else, and must outlive the process."""
    services = make_services(COLDFRAME_STORAGE=storage)
    services.start()
    with services.client() as client:
        old = client.create_sandbox(IMAGE)
        old.exec("echo old > /file")
        mark = old.changes().mark
        old.exec("echo more > /more")
        services.kill()
        services.start()
        assert [one.path for one in old.changes(mark).entries] == [b"/more"]
        new = client.create_sandbox(IMAGE)
        new.exec("echo new > /file")
        old.exec("echo more >> /file")
        assert [old.files.read("/file"), new.files.read("/file")] == [b"old\nmore\n", b"new\n"]
        assert old.fingerprint() != new.fingerprint()
        assert client.capabilities().storage == storage
        old.delete()
        assert client.ledger().balanced
        # Leases, names and what is known of ended ones survive a second time.
        services.kill()
        services.start()
        assert [one.id for one in client.list_sandboxes()] == [new.id]
        assert old.refresh().state is SandboxState.DELETED
        assert client.ledger().balanced


def test_network_policies_hold_again(services: Services) -> None:
    """A policy is never open wider than it was, and is in force when the service is there."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE, network=["packages.example:443"])
        before = sandbox.files.read("/etc/resolv.conf")
        services.kill()
        services.start()
        assert sandbox.files.read("/etc/resolv.conf") == before
        assert sandbox.exec("nc -w 3 192.0.2.1 80 < /dev/null").text == ""
        events = sandbox.egress_events().events
        assert {"192.0.2.1"} <= {event.address for event in events}, events
        assert all(event.decision != "allowed" or event.kind == "policy" for event in events)
        assert [str(rule) for rule in sandbox.refresh().spec.network.rules] != []


def test_second_signal_and_leaving_lose_no_state(services: Services) -> None:
    """Who cannot wait for commands to end must be able to go on with them."""
    for stop in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1,)):
        process = services.start()
        with services.client() as client:
            sandbox = client.create_sandbox(IMAGE)
            command = sandbox.start("while ! [ -e /go ]; do sleep 0.1; done; echo done")
            for number in stop:
                process.send_signal(number)
                wait_until(lambda: not services.answers())
            assert process.wait(30) == 0
            services.start()
            sandbox.exec("touch /go")
            assert command.wait().text == "done\n"
            sandbox.delete()
            assert client.ledger().balanced
        assert services.signal(signal.SIGTERM) == 0


def test_spawner_that_dies_too_is_accounted_for(services: Services) -> None:
    """When nothing is left to go on with, nothing may be left over either."""
    services.start()
    with services.client() as client:
        sandboxes = [client.create_sandbox(IMAGE) for _ in range(4)]
        assert len(_workers_of(services)) == 2
        # One of two: its sandboxes are lost, the others' go on.
        services.kill()
        victim = _workers_of(services)[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(_workers_of(services)) == 1)
        services.start()
        alive = client.list_sandboxes()
        assert 0 < len(alive) < 4
        assert [one.exec("echo here").text for one in alive] == ["here\n"] * len(alive)
        client.create_sandbox(IMAGE).keep()
        ledger = client.ledger()
        assert (ledger.lost, ledger.live) == (4 - len(alive), len(alive) + 1)
        assert ledger.balanced, ledger
        assert len({one.id for one in sandboxes} & {one.id for one in alive}) == len(alive)
        for sandbox in sandboxes:
            sandbox.keep()
        # All: the next look finds what is left, and takes it away.
        services.kill()
        for pid in _workers_of(services):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not _workers_of(services))
    reaped = services.command("gc")
    assert reaped.returncode == 0, reaped.stdout + reaped.stderr
    total = machine.survey(services.home).ledger()
    assert (total.created, total.lost, total.live, total.leaked) == (5, 5, 0, 0)


def test_what_nobody_serves_is_told_kept_and_ended_on_request(services: Services) -> None:
    """It must not be reaped as garbage, nor be overlooked for ever."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        sandbox.keep()
    services.kill()

    assert services.command("gc").returncode == 0
    told = json.loads(services.command("ledger", "--json").stdout)
    assert (told["live"], told["leaked"], told["balanced"]) == (1, 0, True)
    assert [(node["alive"], node["waits"]) for node in told["nodes"]] == [(True, True)]
    assert told["nodes"][0]["sandboxes"] == [sandbox.id]
    assert "waits for a service" in services.command("ledger").stdout
    assert json.loads(services.command("node", "status", "--json").stdout)["left"] != []

    ended = services.command("gc", "--all")
    assert (ended.returncode, "which no process served" in ended.stdout) == (0, True)
    assert processes_of(sandbox.id) == []
    assert list((services.home / "nodes").iterdir()) == []
    assert machine.survey(services.home).ledger().balanced


def test_nobody_coming_back_ends_it(make_services: Callable[..., Services]) -> None:
    """A machine that nobody serves any more must not be full of sandboxes for ever."""
    services = make_services(COLDFRAME_GRACE_S="2")
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        sandbox.keep()
    services.kill()
    assert len(orphans.left(services.home)) == 1
    wait_until(lambda: orphans.left(services.home) == ())
    assert processes_of(sandbox.id) == []
    assert services.command("gc").returncode == 0


def test_home_that_was_removed_takes_what_nobody_serves_along(services: Services) -> None:
    """Nobody could ever reach it again."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        sandbox.keep()
    spawners = _workers_of(services)
    services.kill()
    nodes = services.home / "nodes"
    (node,) = nodes.iterdir()
    shutil.rmtree(nodes)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in spawners))
    assert processes_of(sandbox.id) == []
    reap_cgroups(census.node_cgroups(node.name))


def test_spawner_of_another_version_is_refused_and_unharmed(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade over too many versions says what to do, and ends nothing."""
    services.start()
    with services.client() as client:
        sandbox = client.create_sandbox(IMAGE)
        services.kill()

        async def taken_over() -> None:
            (directory,) = (services.home / "nodes").iterdir()
            socks, _ = workers.connect_all(directory / "workers")
            with contextlib.ExitStack() as stack:
                for sock in socks:
                    stack.enter_context(sock)
                await workers.attach(
                    socks[0], lambda *_: None, lambda *_: None, first_id=time.monotonic_ns()
                )

        with monkeypatch.context() as patched:
            patched.setattr(wire, "VERSION", wire.VERSION + 1)
            with pytest.raises(VersionMismatchError, match="gc --all"):
                asyncio.run(taken_over())
        services.start()
        assert sandbox.exec("echo here").text == "here\n"


def test_sandbox_that_nobody_was_told_of_does_not_outlive_its_maker(services: Services) -> None:
    """Nobody could ever delete it."""
    services.start()
    with services.client() as client:
        kept = client.create_sandbox(IMAGE)
        with pytest.raises((ColdframeError, SandboxStateError)):
            kept.exec(["/no/such"])
        services.kill()
        services.start()
        assert [one.id for one in client.list_sandboxes()] == [kept.id]
        assert (client.ledger().created, client.ledger().live) == (1, 1)
