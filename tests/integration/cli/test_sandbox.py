"""`coldframe sandbox` as processes of their own, on a service as it is started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import Sandbox, SandboxClient
from coldframe.protocol.errors import ProgramNotFoundError
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until
from tests.integration.cli.conftest import COMMAND, run


def test_exec_is_the_command_run_there(box: Sandbox) -> None:
    """Streams apart, stdin passed in, options kept, the exit code its own."""
    ran = run(
        *("exec", "-e", "A=b", "box", "--", "sh", "-c", "cat; echo $A >&2; exit 7"), stdin=b"\xff\n"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, b"\xff\n", b"b\n")
    assert run("exec", "box", "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert run("exec", "box", "--deadline", "0.3", "--", "sleep", "60").returncode == 124
    missing = run("exec", "box", "--", "no-such-program")
    assert (missing.returncode, b"no-such-program" in missing.stderr) == (127, True)
    told = json.loads(run("exec", "--json", "box", "--", "sh", "-c", "echo x; exit 3").stdout)
    assert (told["exit_code"], told["stdout"]) == (3, "x\n")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (125, ("exec", "no-such", "--", "true")),
        (125, ("session", "exec", "no-such", "id", "true")),
        (125, ("logs", "--follow", "no-such", "id")),
        (125, ("logs", "--json", "no-such", "id")),
        (125, ("exec", "-w", "/no-such", "box", "--", "true")),
        (127, ("exec", "box", "--", "no-such")),
        (2, ("logs", "no-such", "id")),
        (2, ("rm", "no-such")),
        (2, ("session", "ls", "no-such")),
        (2, ("session", "start", "no-such")),
        (2, ("session", "start", "-w", "/no-such", "box")),
        (2, ("session", "start", "--shell", "/no-such", "box")),
        (2, ("cp", "box:/no-such", ".")),
        (2, ("cp", "no-such", "box:/")),
    ],
)
def test_what_is_not_there_has_one_exit_code(
    box: Sandbox, code: int, words: tuple[str, ...]
) -> None:
    """2, but where the exit code is a command's: that of a test run may well be 2."""
    ran = run(*words)
    assert (ran.returncode, b"no-such" in ran.stderr) == (code, True), ran.stderr
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, ("exec", "box", "--", "true")),
        (2, ("exec", "--no-such-option", "box", "--", "true")),
        (2, ("ls", "--label", "no-value")),
        (7, ("exec", "box", "--", "sh", "-c", "exit 7")),
        (2, ("exec", "box", "--", "sh", "-c", "exit 2")),
        (124, ("exec", "--deadline", "0.2", "box", "--", "sleep", "60")),
        (125, ("exec", "--user", "no-such", "box", "--", "true")),
        (126, ("exec", "box", "--", "/etc")),
        (127, ("exec", "box", "--", "no-such-program")),
        (128 + 15, ("exec", "box", "--", "sh", "-c", "kill -15 $$")),
    ],
)
def test_exit_codes_are_those_of_the_table(box: Sandbox, code: int, words: tuple[str, ...]) -> None:
    """Scripts branch on them: docs/service.md says which there are."""
    assert run(*words).returncode == code


def test_exit_code_is_1_where_no_command_has_one_and_125_where_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node that is gone is no mistake of whoever typed."""
    monkeypatch.setenv("COLDFRAME_URL", f"unix:{tmp_path}/nobody.sock")
    assert run("ls").returncode == 1
    assert run("exec", "box", "--", "true").returncode == 125


def test_logs_follow_a_command_that_runs_by_its_id(box: Sandbox) -> None:
    """What was started and left must be found again, from its first byte on."""
    script = "echo first; until [ -e go ]; do sleep 0.02; done; echo last; echo err >&2; exit 5"
    started = run("exec", "--detach", "box", "--", "sh", "-c", script)
    operation_id = started.stdout.decode().strip()
    deadline = time.monotonic() + 20
    while (so_far := run("logs", "box", operation_id)).stdout != b"first\n":
        assert time.monotonic() < deadline, so_far
    assert so_far.returncode == 0
    early = run("logs", "--json", "box", operation_id)
    assert (early.returncode, b"has not ended" in early.stderr) == (125, True)

    with subprocess.Popen(
        [*COMMAND, "logs", "-f", "box", operation_id],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert following.stdout.readline() == b"first\n"
        box.exec("touch go")
        assert following.stdout.read() == b"last\n"
        assert following.stderr.read() == b"err\n"
        assert following.wait(30) == 5
    assert run("logs", "box", operation_id).stdout == b"first\nlast\n"
    assert json.loads(run("logs", "--json", "box", operation_id).stdout)["exit_code"] == 5


def test_logs_list_commands_with_what_they_are_and_how_they_ended(box: Sandbox) -> None:
    """Two background commands must be told apart by more than an id."""
    none = run("logs", "box")
    assert (none.returncode, b"exec --detach box" in none.stderr) == (0, True)
    server = box.start(["sh", "-c", "sleep 300; :"])
    ended = box.exec("echo 'a\x1b[31m'\nexit 7")
    box.start("kill -9 $$").wait()
    with pytest.raises(ProgramNotFoundError):
        box.exec(["no-such-program"])
    listed = run("logs", "box")
    header, *rows = listed.stdout.decode().splitlines()
    assert header.split() == ["ID", "STARTED", "STATE", "COMMAND"]
    assert [row.split("  ", 1)[0] for row in rows[:2]] == [server.operation_id, ended.operation_id]
    assert [re.split("  +", row)[2:] for row in rows[:3]] == [
        ["running", "sh -c 'sleep 300; :'"],
        ["exit 7", "echo 'a\N{REPLACEMENT CHARACTER}[31m' exit 7"],
        ["signal 9", "kill -9 $$"],
    ]
    assert rows[3].split()[-2:] == ["failed", "no-such-program"]
    told = json.loads(run("logs", "--json", "box").stdout)
    assert [one["exit_code"] for one in told] == [None, 7, None, None]
    assert told[0]["operation_id"] == server.operation_id
    assert "no-such-program" in told[3]["failure"]
    assert abs(told[0]["started_at"] - ended.started_at) < 60
    server.kill()
    assert run("logs", "--follow", "box").returncode == 2


def test_logs_that_are_interrupted_leave_the_command_alone(box: Sandbox) -> None:
    """Whoever stops looking does not stop what is looked at."""
    process = box.start("echo x; sleep 300")
    with subprocess.Popen(
        [*COMMAND, "logs", "-f", "box", process.operation_id], stdout=subprocess.PIPE
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"x\n"
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130
    assert process.poll() is None
    process.kill()


class Terminal:
    """`coldframe sandbox` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(30, 90)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )
        self.seen = b""

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def until(self, wanted: bytes, within_s: float = 30) -> None:
        deadline = time.monotonic() + within_s
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(wanted)[2]

    def ended(self) -> int:
        """Return the exit code; the terminal must be as it was."""
        code = self.process.wait(30)
        assert termios.tcgetattr(self.slave) == self.before
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(box: Sandbox) -> Iterator[Terminal]:
    """A shell in the sandbox that has begun."""
    opened = Terminal("shell", "box", "--", "/bin/sh")
    opened.type(b"echo ready-$((40+2))\n")
    opened.until(b"ready-42")
    yield opened
    opened.close()


def test_shell_is_a_terminal_of_our_size_that_follows_it(terminal: Terminal) -> None:
    """Editors and pagers there draw on the window here."""
    terminal.type(b"stty size\n")
    terminal.until(b"30 90")
    terminal.resize(50, 132)
    terminal.process.send_signal(signal.SIGWINCH)  # the kernel sends it to a foreground group
    deadline = time.monotonic() + 20
    while b"50 132" not in terminal.seen:
        assert time.monotonic() < deadline, terminal.seen
        terminal.type(b"stty size; echo sized\n")
        time.sleep(0.2)
        terminal.seen += os.read(terminal.master, 65536)
    terminal.type(b"exit 9\n")
    assert terminal.ended() == 9


def test_shell_gives_its_keys_to_the_sandbox(terminal: Terminal) -> None:
    """Ctrl-C ends what runs there, not what shows it here."""
    # Said by what has the terminal: between two commands it is the shell's, which may pass it over.
    terminal.type(b"sh -c 'echo begins-$((40+2)); exec cat > /dev/null'\n")
    terminal.until(b"begins-42")
    terminal.type(b"\x03")
    terminal.until(b"^C")
    terminal.type(b"\necho code-$((100+30))\n")
    terminal.until(b"code-130")
    terminal.type(b"\x04")
    terminal.ended()


def test_shell_whose_sandbox_goes_gives_the_terminal_back(terminal: Terminal, box: Sandbox) -> None:
    """Else whoever sits there types blind."""
    box.delete()
    assert terminal.ended() != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_shell_that_is_signalled_gives_the_terminal_back(
    terminal: Terminal, number: signal.Signals
) -> None:
    """The second signal ends whatever ignores the first."""
    terminal.process.send_signal(number)
    with_second = threading.Timer(1.0, terminal.process.send_signal, [number])
    with_second.start()
    assert terminal.ended() != 0
    with_second.cancel()


def test_node_that_would_end_with_the_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id would be printed of a sandbox that is gone already."""
    monkeypatch.setenv("COLDFRAME_URL", "in-process")
    for words in (("create", "any"), ("ls",), ("cp", "x", "box:/x")):
        ran = run(*words)
        assert (ran.returncode, b"coldframe run" in ran.stderr) == (2, True), ran.stderr


def test_shell_without_a_terminal_is_refused(box: Sandbox) -> None:
    """It names what is meant for scripts."""
    ran = run("shell", "box")
    assert (ran.returncode, b"sandbox exec" in ran.stderr) == (2, True)


def test_cp_copies_files_and_trees_both_ways(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are those of cp and of docker cp."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "f").write_bytes(b"\x00\xff")
    (tmp_path / "a:b").write_text("colon")
    there = "/work"
    box.files.mkdir(there)

    def cp(source: str, target: str) -> subprocess.CompletedProcess[bytes]:
        return run("cp", source, target)

    assert cp("tree/sub/f", f"box:{there}/g").returncode == 0
    assert box.files.read(f"{there}/g") == b"\x00\xff"
    assert cp("tree/sub/f", f"box:{there}").returncode == 0
    assert box.files.read(f"{there}/f") == b"\x00\xff"
    assert cp("./a:b", f"box:{there}/new/").returncode == 0
    assert box.files.read(f"{there}/new/a:b") == b"colon"
    assert cp("tree", f"box:{there}/copy").returncode == 0
    assert box.files.read(f"{there}/copy/sub/f") == b"\x00\xff"
    assert cp("tree", f"box:{there}/copy").returncode == 0
    assert box.files.exists(f"{there}/copy/tree/sub/f")
    assert cp("tree/.", f"box:{there}/new").returncode == 0
    assert box.files.exists(f"{there}/new/sub/f")

    assert cp(f"box:{there}/g", "here").returncode == 0
    assert Path("here").read_bytes() == b"\x00\xff"
    assert cp(f"box:{there}/g", ".").returncode == 0
    assert Path("g").read_bytes() == b"\x00\xff"
    assert cp(f"box:{there}/copy", "out").returncode == 0
    assert Path("out/sub/f").exists()
    assert cp(f"box:{there}/copy", "out").returncode == 0
    assert Path("out/copy/sub/f").exists()
    told = run("cp", "--json", f"box:{there}/copy/.", "content")
    assert json.loads(told.stdout) == {"files": 5, "target": "content"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "b"), b"one side is in a sandbox"),
        (("box:/a", "box:/b"), b"one side is in a sandbox"),
        (("box:a", "b"), b"absolute"),
        (("no-such-file", "box:/tmp"), b"no 'no-such-file' here"),
        (("box:/no-such-file", "."), b"no '/no-such-file' in the sandbox"),
        (("box:/no/..", "."), b"name what is to be copied"),
    ],
)
def test_cp_that_makes_no_sense_says_so(box: Sandbox, words: tuple[str, str], said: bytes) -> None:
    """In a sentence, with nothing copied."""
    ran = run("cp", *words)
    assert ran.returncode in {1, 2}
    assert said in ran.stderr


@pytest.mark.parametrize("link", ["/etc", "../../..", "sub/../../out"])
def test_cp_of_a_hostile_tree_leaves_nothing_outside(
    box: Sandbox, tmp_path: Path, link: str
) -> None:
    """A sandbox chooses the names and links that are written here."""
    assert box.exec(f"mkdir -p t/sub && ln -s {link} t/link && echo x > t/z").ok
    target = tmp_path / "in" / "here"
    target.parent.mkdir()
    ran = run("cp", "box:/t", str(target))
    assert (ran.returncode, b"may lead outside" in ran.stderr) == (1, True)
    assert not (target / "link").exists()
    assert [path.name for path in tmp_path.rglob("*") if target not in path.parents] == [
        "in",
        "here",
    ]


def test_cp_writes_over_no_file_through_a_link_that_lies_here(box: Sandbox, tmp_path: Path) -> None:
    """The link is replaced, what it leads to is not written."""
    box.files.write("/f", "new")
    (tmp_path / "victim").write_text("old")
    (tmp_path / "f").symlink_to(tmp_path / "victim")
    assert run("cp", "box:/f", str(tmp_path / "f")).returncode == 0
    assert (tmp_path / "victim").read_text() == "old"
    assert (tmp_path / "f").read_text() == "new"


def _events(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "coldframe.cli.main", "events", *words]
    return subprocess.run(command, check=False, capture_output=True, timeout=60)


def test_events_tell_what_became_of_a_sandbox_and_go_on(box: Sandbox, service: Service) -> None:
    """Dashboards follow them; a cursor says where to go on after a break."""
    told = [json.loads(line) for line in _events("--json", "--sandbox", "box").stdout.splitlines()]
    assert [one["state"] for one in told] == ["requested", "provisioning", "ready"]
    assert _events("--sandbox", "box", "--since", told[-1]["cursor"]).stdout == b""
    line = _events("--sandbox", "box", "--since", told[-2]["cursor"]).stdout.decode()
    assert line.split()[2:5] == [box.id, "ready", f"v{told[-1]['version']}"]
    assert line.split()[-1] == told[-1]["cursor"]
    expired = _events("--since", "nonsense")
    assert expired.returncode in {1, 2}
    assert expired.stderr.startswith(b"coldframe: "), expired.stderr

    command = [sys.executable, "-m", "coldframe.cli.main", "events", "-f", "--json", "--since"]
    with subprocess.Popen([*command, told[-1]["cursor"]], stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        with SandboxClient(url=service.unix) as client, client.create_sandbox("any") as other:
            seen = [json.loads(following.stdout.readline()) for _ in range(3)]
        assert {one["sandbox_id"] for one in seen} == {other.id}
        assert seen[-1]["state"] == "ready"
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130


SERVER = """
import http.server, socketserver
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"from inside")
    def log_message(self, *a): pass
s = socketserver.TCPServer(("127.0.0.1", 0), H)
print(s.server_address[1], flush=True)
s.serve_forever()
"""


def test_port_is_forwarded_until_interrupted(box: Sandbox) -> None:
    """A browser here looks at a server there."""
    server = box.start(["python3", "-c", SERVER])
    inner = int(server.read("stdout").data)
    with subprocess.Popen(
        [*COMMAND, "port", "--json", "box", f"0:{inner}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as forwarding:
        assert forwarding.stdout is not None
        assert forwarding.stderr is not None
        opened = json.loads(forwarding.stdout.readline())
        assert opened["host"] == "127.0.0.1"
        url = f"http://127.0.0.1:{opened['port']}/"
        for _ in range(3):
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.read() == b"from inside"
        with socket.create_connection(("127.0.0.1", opened["port"])) as idle:
            forwarding.send_signal(signal.SIGINT)
            assert forwarding.wait(30) == 0
            idle.settimeout(10)
            assert idle.recv(1) == b""
        assert forwarding.stderr.read() == b""
    server.kill()


def test_port_that_nobody_serves_is_told_and_others_go_on(box: Sandbox) -> None:
    """The connection ends, the forwarding does not."""
    with subprocess.Popen(
        [*COMMAND, "port", "--json", "box", "0:1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as forwarding:
        assert forwarding.stdout is not None
        assert forwarding.stderr is not None
        opened = json.loads(forwarding.stdout.readline())
        for _ in range(2):
            with (
                socket.create_connection(("127.0.0.1", opened["port"]), timeout=10) as one,
                contextlib.suppress(ConnectionResetError),
            ):
                assert one.recv(1) == b""
            assert b"coldframe:" in forwarding.stderr.readline()
        forwarding.send_signal(signal.SIGTERM)
        assert forwarding.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--name", "bad name!"), b"--name bad name!: letters, digits"),
        (("--ttl", "-1"), b"--ttl -1: more than 0\n"),
        (("--ttl", "always"), b"--ttl 'always': a number of seconds, or never\n"),
        (("--ttl", "inf"), b"--ttl inf: "),
        (("--network", "no rule"), b"no rule"),
        (("--pids", "1"), b"--pids 1: at least 4\n"),
        (("--shm", "1"), b"--shm 1: at least 1"),
        (("--user", ""), b"user: it is empty"),
    ],
)
def test_sandbox_that_cannot_be_is_refused_by_its_option(
    box: Sandbox, words: tuple[str, ...], said: bytes
) -> None:
    """Whoever types an option does not know the field that it becomes."""
    refused = run("create", "any", *words)
    assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr


@pytest.mark.usefixtures("box")
def test_sandbox_without_a_lease_is_asked_for_by_a_word() -> None:
    """No number means never, and one that is long enough is somebody's guess."""
    for words, ttl_s in ((("--ttl", "never"), None), ((), 7200.0), (("--ttl", "90"), 90.0)):
        made = run("create", "any", "--json", *words)
        info = json.loads(made.stdout)
        assert info["spec"]["ttl_s"] == ttl_s
        assert (info["expires_at"] is None) == (ttl_s is None)
        assert run("rm", info["id"]).returncode == 0


def test_none_is_deleted_when_one_is_not_known(box: Sandbox) -> None:
    """A list with a mistake in it is looked at again, and given again."""
    refused = run("rm", "box", "no-such-box")
    assert (refused.returncode, b"no-such-box" in refused.stderr) == (2, True)
    assert box.info.state == "ready"
    assert run("rm", "box", box.id, "box").returncode == 0
    assert run("rm", box.id).returncode == 0


def test_sandbox_whose_lease_ended_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`terminating` for minutes, without a reason, looks as if something hung."""
    with serving(tmp_path, "fake", COLDFRAME_QUARANTINE_S="300") as service:
        monkeypatch.setenv("COLDFRAME_URL", service.unix)
        made = run("create", "any", "--ttl", "0.2").stdout.decode().strip()
        wait_until(lambda: f"{made}  terminating; its lease ended, kept until" in _listed())


def _listed() -> str:
    return run("ls").stdout.decode()


@pytest.mark.parametrize("name", ["create", "exec", "shell", "ls", "rm", "cp", "logs", "port"])
def test_help_of_every_command_teaches(name: str) -> None:
    """What it does, what it takes, and where it ends."""
    told = run(name, "--help").stdout.decode()
    assert "Usage: coldframe sandbox" in told
    assert len(told.splitlines()) >= 8
