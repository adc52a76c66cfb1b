"""`coldframe sandbox session`: each command is a process of its own, and the shell stays."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from coldframe import Sandbox
from tests.fixtures.waiting import wait_until
from tests.integration.cli.conftest import COMMAND, run


@pytest.fixture
def session(box: Sandbox) -> str:
    """The id of a session that a command has started in `box`."""
    box.files.mkdir("/srv/app")
    started = run("session", "start", "-w", "/srv", "-e", "A=b", "box")
    assert started.returncode == 0, started.stderr
    return started.stdout.decode().strip()


def _exec(session: str, line: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    return run("session", "exec", *options, "box", session, line)


def test_session_lives_on_between_commands(session: str) -> None:
    """Whoever has only a shell of their own must have sessions, too."""
    assert _exec(session, "cd app; f() { echo $A; }; x=1").returncode == 0
    told = _exec(session, "echo ${PWD##*/}; f; echo $x >&2; (exit 7)")
    assert (told.returncode, told.stdout, told.stderr) == (7, b"app\nb\n", b"1\n")
    assert _exec(session, "echo $?").stdout == b"7\n"
    told = _exec(session, "echo $C; exit 3", "-e", "C=d", "--json")
    assert json.loads(told.stdout)["stdout"] == "d\n"
    assert told.returncode == 3
    over = _exec(session, "true")
    assert (over.returncode, b"its shell has ended" in over.stderr) == (125, True)


def test_session_is_listed_with_what_runs_and_closed(box: Sandbox, session: str) -> None:
    """What runs must be found, read and ended by whoever comes later."""
    with subprocess.Popen(
        [*COMMAND, "session", "exec", "box", session, "echo begun; sleep 300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"begun\n"
        (listed,) = json.loads(run("session", "ls", "--json", "box").stdout)
        assert listed["id"] == session
        assert run("logs", "box", listed["running"]).stdout == b"begun\n"
        assert session in run("session", "ls", "box").stdout.decode()
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    late = _exec(session, "sleep 300", "--deadline", "0.3")
    assert (late.returncode, b"--deadline" in late.stderr) == (124, True)
    assert _exec(session, "echo still here").stdout == b"still here\n"

    _exec(session, "sleep 300 &")
    closed = run("session", "close", "--kill", "--json", "box", session)
    assert json.loads(closed.stdout)["ended"] is not None
    wait_until(lambda: not box.processes())
    assert run("session", "close", "box", session).returncode == 0
    nothing = run("session", "ls", "box")
    assert b"coldframe sandbox session start box" in nothing.stderr
    unknown = _exec("no-such", "true")
    assert (unknown.returncode, b"no session has the id 'no-such'" in unknown.stderr) == (125, True)
