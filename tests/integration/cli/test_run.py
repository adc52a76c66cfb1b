"""`coldframe run` as a process of its own: streams, signals, exit codes.

On the fake runtime: what is tested is the command's dealing with our own streams and
signals; that the sandbox holds is tested with the native runtime elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

Start: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]

RUN = [sys.executable, "-m", "coldframe.cli.main", "run"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which nodes are fake and their state is thrown away."""
    return {**os.environ, "COLDFRAME_RUNTIME": "fake", "COLDFRAME_HOME": str(tmp_path / "home")}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start `coldframe run` and make sure that it does not outlive the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **keywords: object) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **keywords}
        process = subprocess.Popen(
            [*RUN, *arguments], env=environment, stderr=subprocess.PIPE, **options
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _run(
    environment: dict[str, str], *arguments: str, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [*RUN, *arguments], env=environment, capture_output=True, check=False, timeout=60, **given
    )


def test_run_keeps_streams_apart_and_passes_the_exit_code(environment: dict[str, str]) -> None:
    """It stands in pipelines in place of the command itself."""
    ended = _run(environment, "any", "--", "sh", "-c", "printf out; printf err >&2; exit 7")

    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"out", b"err")


def test_run_after_a_signal_exits_as_a_shell_would(environment: dict[str, str]) -> None:
    """128 + N is what scripts look for."""
    ended = _run(environment, "any", "--", "sh", "-c", "kill -TERM $$")

    assert ended.returncode == 128 + signal.SIGTERM


def test_run_passes_piped_stdin_byte_for_byte(environment: dict[str, str]) -> None:
    """Bytes that are no text, and more of them than a pipe holds."""
    data = bytes(range(256)) * 2000

    ended = _run(environment, "any", "--", "cat", stdin=data)

    assert (ended.returncode, ended.stdout) == (0, data)


def test_run_passes_a_file_as_stdin(environment: dict[str, str], tmp_path: Path) -> None:
    """A regular file cannot be polled like a pipe."""
    source = tmp_path / "input"
    source.write_bytes(b"line\n" * 50_000)

    with source.open("rb") as file:
        ended = subprocess.run(
            [*RUN, "any", "--", "wc", "-l"],
            env=environment,
            stdin=file,
            capture_output=True,
            check=True,
            timeout=60,
        )

    assert ended.stdout.strip() == b"50000"


def test_run_with_stdin_left_open_ends_with_its_command(start: Start) -> None:
    """A job runner that never closes our stdin must not keep the sandbox alive."""
    process = start("any", "--", "sh", "-c", "echo done", stdin=subprocess.PIPE)

    assert process.stdout.read() == b"done\n"
    assert process.wait(60) == 0


def test_run_shows_output_before_the_command_has_ended(start: Start) -> None:
    """Output that is held back until the end is no progress."""
    process = start("any", "--", "sh", "-c", "echo first; read x; echo $x", stdin=subprocess.PIPE)

    assert process.stdout.readline() == b"first\n"
    process.stdin.write(b"second\n")
    process.stdin.close()
    assert process.stdout.readline() == b"second\n"
    assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_hands_a_signal_to_the_command(start: Start, number: signal.Signals) -> None:
    """The command may want to clean up; its exit code counts."""
    script = (
        f"trap 'echo caught; exit 9' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    )
    process = start("any", "--", "sh", "-c", script)
    assert process.stdout.readline() == b"ready\n"

    process.send_signal(number)

    assert process.stdout.read() == b"caught\n"
    assert process.wait(60) == 9


def test_run_kills_at_the_second_signal(start: Start) -> None:
    """A command that ignores signals must not trap who started it."""
    script = "trap 'echo no' INT; echo ready; while :; do sleep 0.05; done"
    process = start("any", "--", "sh", "-c", script)
    assert process.stdout.readline() == b"ready\n"

    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"no\n"
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_started_without_a_standard_stream_has_an_empty_one(
    environment: dict[str, str], closed: str
) -> None:
    """As by cron or a daemon: no descriptor of ours may be read or written in its place."""
    script = f'"$@" {closed}'
    command = "cat; echo out; echo err >&2; exit 5"
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *RUN, "fake", "--", "/bin/sh", "-c", command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 5, done.stderr
    assert done.stdout == (b"" if ">&-" in closed.split() else b"out\n")
    assert done.stderr == (b"" if "2>&-" in closed else b"err\n")


def test_run_past_its_deadline_says_so_and_exits_124(environment: dict[str, str]) -> None:
    """As timeout(1) does; what was printed is not lost."""
    ended = _run(environment, "any", "--deadline", "0.3", "--", "sh", "-c", "echo hi; sleep 60")

    assert (ended.returncode, ended.stdout) == (124, b"hi\n")
    assert ended.stderr == b"coldframe: the command was killed after 0.3 s (--deadline)\n"


def test_run_whose_reader_has_gone_kills_the_command(start: Start) -> None:
    """`coldframe run IMAGE -- yes | head -1` must come to an end."""
    process = start("any", "--", "yes")
    assert process.stdout.readline() == b"y\n"

    process.stdout.close()

    assert process.wait(60) == 1
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["any", "--", "no-such-program"], 127, b"no-such-program"),
        (["any", "--", "/etc"], 126, b"/etc"),
        (["any"], 2, b"no command"),
        (["any", "--memory", "many", "--", "true"], 2, b"'many' is not a size"),
        (["any", "--env", "NAME", "--", "true"], 2, b"NAME=VALUE"),
        (["any", "--pids", "1", "--", "true"], 2, b"--pids 1: at least 4\n"),
        (["any", "--cpu", "-1", "--", "true"], 2, b"--cpu -1.0: at least 0.01\n"),
        (["any", "--memory", "1k", "--", "true"], 2, b"--memory 1k: at least 4 MiB\n"),
        (["any", "--disk", "9999T", "--", "true"], 2, b"--disk 9999T: at most 1024 TiB\n"),
        (["any", "--deadline", "0", "--", "true"], 2, b"deadline_s"),
        (["any", "-t", "--json", "--", "true"], 2, b"contradict"),
    ],
)
def test_run_that_cannot_start_gives_one_sentence(
    environment: dict[str, str], arguments: list[str], code: int, said: bytes
) -> None:
    """It names the thing that is wrong, and nothing was run."""
    ended = _run(environment, *arguments)

    assert (ended.returncode, ended.stdout) == (code, b"")
    assert ended.stderr.startswith(b"coldframe: ")
    assert said in ended.stderr
    assert ended.stderr.count(b"\n") == 1


def test_run_takes_options_on_both_sides_of_the_image(environment: dict[str, str]) -> None:
    """And none of the command's own behind the dashes."""
    command = ["--", "sh", "-c", "echo $A $B $0", "--cpu"]

    ended = _run(environment, "-e", "A=1", "any", "--env", "B=2", "--memory", "512M", *command)

    assert ended.stdout == b"1 2 --cpu\n"


def test_run_with_json_prints_one_object(environment: dict[str, str]) -> None:
    """Programs read it; the whole output is known by length and digest."""
    ended = _run(environment, "--json", "any", "--", "sh", "-c", "echo out; echo err >&2; exit 3")

    result = json.loads(ended.stdout)
    assert ended.returncode == 3
    assert {name: result[name] for name in ("reason", "exit_code", "stdout", "stderr")} == {
        "reason": "exit",
        "exit_code": 3,
        "stdout": "out\n",
        "stderr": "err\n",
    }
    assert result["stdout_bytes"] == 4


def test_run_on_a_terminal_has_its_size_and_its_keys(environment: dict[str, str]) -> None:
    """Editors and pagers need the true size, and every key as it is pressed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    script = "stty size; read x; echo got $x; exit 5"
    process = subprocess.Popen(
        [*RUN, "-t", "any", "--", "sh", "-c", script],
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        seen = _read_until(master, b"33 99")
        os.write(master, b"key\r")
        seen += _read_until(master, b"got key")
        assert process.wait(60) == 5
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _read_until(fd: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([fd], [], [], 60)
        assert ready, seen
        seen += os.read(fd, 4096)
    return seen


def test_run_killed_outright_leaves_no_process(start: Start) -> None:
    """SIGKILL runs no clean-up of ours; the command must end all the same."""
    process = start("any", "--", "sh", "-c", "echo $$; exec sleep 600")
    inner = int(process.stdout.readline())
    watched = os.pidfd_open(inner)

    process.kill()

    try:
        ready, _, _ = select.select([watched], [], [], 60)
        assert ready
    finally:
        os.close(watched)
