"""`coldframe sandbox` against a service, and which node a client chooses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coldframe import InvalidRequestError, SandboxClient
from coldframe.client._address import parse
from tests.fixtures.service import Service


def _run(service: Service, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", "sandbox", *words],
        env={**os.environ, "COLDFRAME_URL": service.unix},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def test_sandbox_is_made_used_listed_and_removed_from_the_shell(service: Service) -> None:
    """What the shell makes must live on after the command that made it."""
    made = _run(service, "create", "any", "--name", "box", "-l", "run=1")
    assert made.returncode == 0, made.stderr
    sandbox_id = made.stdout.strip()

    ran = _run(service, "exec", "box", "--", "sh", "-c", "cat; echo err >&2; exit 7", stdin="in\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "in\n", "err\n")
    listed = json.loads(_run(service, "ls", "-l", "run=1", "--json").stdout)
    assert [(one["id"], one["state"]) for one in listed] == [(sandbox_id, "ready")]
    header, row = _run(service, "ls", "-l", "run=1").stdout.splitlines()
    assert header.split() == ["SANDBOX", "STATE", "IMAGE", "MADE", "NAME"]
    assert (row.split()[0], row.split()[-1]) == (sandbox_id, "box")
    assert _run(service, "rm", "box").returncode == 0
    none = _run(service, "ls", "-l", "run=1")
    assert (none.stdout.split(), none.returncode) == (header.split(), 0)
    assert "coldframe sandbox create" in none.stderr
    assert json.loads(_run(service, "ls", "-l", "run=1", "--json").stdout) == []
    gone = _run(service, "exec", "box", "--", "true")
    assert (gone.returncode, "no sandbox" in gone.stderr) == (125, True)


def test_constructor_counts_more_than_the_environment(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """A test's own client must not land on the service of whoever runs it."""
    monkeypatch.setenv("COLDFRAME_URL", service.unix)
    with SandboxClient() as by_environment:
        assert by_environment.create_sandbox("any").id.split("-")[1] == _node(service)
    with SandboxClient(in_process=True, runtime="fake", home=str(tmp_path)) as own:
        assert own.create_sandbox("any").id.split("-")[1] != _node(service)
    monkeypatch.setenv("COLDFRAME_URL", "http://127.0.0.1:1")
    with SandboxClient(url=service.tcp) as given:
        assert given.list_sandboxes() == ()
    with pytest.raises(InvalidRequestError):
        SandboxClient(url=service.tcp, runtime="fake")


def _node(service: Service) -> str:
    with SandboxClient(url=service.unix) as client, client.create_sandbox("any") as sandbox:
        return sandbox.id.split("-")[1]


@pytest.mark.parametrize(
    "url",
    ["", "/run/x.sock", "unix:x", "unix://h/x", "ftp://x", "http://", "http://h/p", "http://u@h"],
)
def test_url_that_is_none_is_refused_in_words(url: str) -> None:
    """Before anything is opened."""
    with pytest.raises(InvalidRequestError, match="unix:/PATH"):
        parse(url)


def test_socket_is_made_with_the_directories_above_it(tmp_path: Path) -> None:
    """/run is empty after every boot. Who is not root or the node's user cannot connect."""
    path = tmp_path / "run" / "deep" / "node.sock"
    command = [sys.executable, "-m", "coldframe.cli.main", "serve", "--unix", str(path)]
    environment = {
        **os.environ,
        "COLDFRAME_HOME": str(tmp_path / "home"),
        "COLDFRAME_RUNTIME": "fake",
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline().strip() == f"serving unix:{path}"
        assert oct(path.stat().st_mode)[-3:] == "600"
        second = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert (second.returncode, "coldframe node stop" in second.stderr) == (1, True)
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    assert not path.exists()
