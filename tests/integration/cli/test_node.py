"""`coldframe node`: what runs on this machine, and an end to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import SandboxClient
from coldframe.protocol import places


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of the fake runtime; its node is stopped at the end."""
    monkeypatch.setenv("COLDFRAME_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLDFRAME_RUNTIME", "fake")
    monkeypatch.delenv("COLDFRAME_URL", raising=False)
    yield tmp_path / "home"
    assert _node("stop").returncode == 0


def _node(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", "node", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_status_and_stop_tell_what_is_so(home: Path) -> None:
    """Whoever looks after a machine begins here."""
    none = _node("status")
    assert (none.returncode, "no node runs" in none.stdout) == (1, True)
    assert json.loads(_node("status", "--json").stdout)["running"] is False

    with SandboxClient() as client:
        client.create_sandbox("any")
        told = json.loads(_node("status", "--json").stdout)
        assert (told["running"], told["runtime"]) == (True, "fake")
        assert told["sandboxes"] == {"ready": 1}
        assert f"process {told['pid']}" in _node("status").stdout
        os.kill(told["pid"], 0)
    stopped = _node("stop", "--json")
    assert json.loads(stopped.stdout) == {"home": str(home), "pid": told["pid"], "ended": True}
    assert not places.socket_of(home).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(told["pid"], 0)
    assert "no node runs" in _node("stop").stdout


def test_home_has_one_node_whatever_sockets_it_serves(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of a home would each hold what the other one thinks is its own."""
    serve = [sys.executable, "-m", "coldframe.cli.main", "serve", "--unix"]
    path = tmp_path / "elsewhere.sock"
    with subprocess.Popen([*serve, str(path)], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        said = [service.stdout.readline().strip() for _ in range(2)]
        assert said == [f"serving unix:{path}", f"serving unix:{places.socket_of(home)}"]
        assert json.loads(_node("status", "--json").stdout)["pid"] == service.pid
        with SandboxClient(url=f"unix:{path}") as there, SandboxClient() as here:
            made = there.create_sandbox("any")
            assert [one.id for one in here.list_sandboxes()] == [made.id]
        second = subprocess.run(
            [*serve, str(tmp_path / "second.sock")],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (second.returncode, "coldframe node stop" in second.stderr) == (1, True)
        monkeypatch.setenv("COLDFRAME_URL", f"unix:{path}")
        assert _node("stop").returncode == 0
        assert service.wait(60) == 0
    monkeypatch.delenv("COLDFRAME_URL")
    assert not path.exists()
    assert not places.socket_of(home).exists()


@pytest.mark.parametrize("word", ["status", "stop", "upgrade"])
@pytest.mark.parametrize("url", ["unix:/nowhere/n.sock", "http://127.0.0.1:9"])
def test_node_of_another_service_is_not_taken_for_this_homes(
    home: Path, monkeypatch: pytest.MonkeyPatch, word: str, url: str
) -> None:
    """Who works with one service must not end, or be told of, the sandboxes of another."""
    with SandboxClient() as client:
        sandbox = client.create_sandbox("any")
        monkeypatch.setenv("COLDFRAME_URL", url)
        refused = _node(word)
        monkeypatch.delenv("COLDFRAME_URL")
        assert refused.returncode == 2
        assert f"COLDFRAME_URL={url} is not the node of {home}" in refused.stderr
        assert client.get_sandbox(sandbox.id).info.state == "ready"


@pytest.mark.timeout(40)
def test_stop_now_does_not_wait_for_commands(home: Path) -> None:
    """A command that hangs must not hold up who means it."""
    with SandboxClient() as client:
        sandbox = client.create_sandbox("any")
        sandbox.keep()
        sandbox.start("sleep 300")
        assert _node("stop", "--now").returncode == 0
