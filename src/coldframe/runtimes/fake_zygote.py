"""The process that starts commands for the fake runtime; run as a script, imports only stdlib.

It forks one supervisor per command. The supervisor is a child subreaper, so that whatever
the command starts, daemonised or not, stays below it in the process tree and can be found
and killed as a whole. When the runtime goes away the zygote ends everything below itself.

Wire: one SEQPACKET per command, with descriptors [payload, status, cwd, stdin, stdout, stderr,
and perhaps one more for descriptor 3]; the payload is a memory file with a marshalled dict. The
supervisor answers on `status`: STARTED leader supervisor | FAILED stage errno | ENDED
wait-status, user µs, system µs, peak KiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import marshal
import os
import shutil
import signal
import socket
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any, NoReturn

STARTED, FAILED, ENDED = 1, 2, 3
REPORT = struct.Struct("!Bqqqq")

STAGE_CWD, STAGE_EXEC = 1, 2

_PR_SET_CHILD_SUBREAPER = 36


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (hot, bytes are not needed)
            with contextlib.suppress(OSError):
                listed = Path(f"/proc/{pid}/task/{task}/children").read_bytes()
                found.extend(int(child) for child in listed.split())
    return found


def descendants(pid: int) -> list[int]:
    """Return all pids below a process, nearest first."""
    found = children(pid)
    for child in found:
        found.extend(children(child))
    return found


def kill_below(pid: int) -> int:
    """Send SIGKILL once to all that is below a process; return how many there were."""
    pids = descendants(pid)
    for child in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return len(pids)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _restore_signals() -> None:
    for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _run(payload: dict[str, Any], cwd: int, streams: list[int], report: int) -> NoReturn:
    """Become the command; on failure write stage and errno to `report`."""
    stage = STAGE_CWD
    try:
        os.setsid()
        os.fchdir(cwd)
        # Out of the way of the numbers that the streams are to have.
        streams = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in streams]
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, 16)
        for target, source in enumerate(streams):
            os.dup2(source, target)
        if payload["pty"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.umask(0o022)
        _restore_signals()
        stage = STAGE_EXEC
        failure = OSError(2, "no such program")
        for path in payload["paths"]:
            try:
                os.execve(path, payload["argv"], payload["env"])
            except OSError as error:
                if error.errno not in (2, 20) or failure.errno == 2:
                    failure = error
        raise failure
    except OSError as error:
        os.write(report, struct.pack("!Bq", stage, error.errno or 0))
    finally:
        os._exit(127)


def _supervise(fds: list[int]) -> NoReturn:
    """Start one command, report its end, and stay until nothing below is left."""
    payload_fd, status, cwd, *streams = fds
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    payload: dict[str, Any] = marshal.loads(os.pread(payload_fd, os.fstat(payload_fd).st_size, 0))
    reader, writer = os.pipe2(os.O_CLOEXEC)
    leader = os.fork()
    if leader == 0:
        _run(payload, cwd, streams, writer)
    os.close(writer)
    for fd in {payload_fd, cwd, *streams}:
        os.close(fd)
    failure = os.read(reader, 9)
    os.close(reader)
    if failure:
        stage, number = struct.unpack("!Bq", failure)
        os.waitpid(leader, 0)
        os.write(status, REPORT.pack(FAILED, stage, number, 0, 0))
        os._exit(0)
    os.write(status, REPORT.pack(STARTED, leader, os.getpid(), 0, 0))
    while True:
        try:
            pid, wait_status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            os._exit(0)
        if pid == leader:
            times = int(usage.ru_utime * 1e6), int(usage.ru_stime * 1e6)
            with contextlib.suppress(BrokenPipeError):
                os.write(status, REPORT.pack(ENDED, wait_status, *times, usage.ru_maxrss))


def main(fd: int, base: str) -> None:
    """Serve until the runtime's end of the socket closes, then end everything and remove `base`."""
    channel = socket.socket(fileno=fd)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1, 7)
        if not data:
            break
        for received in fds:
            os.set_inheritable(received, False)
        if os.fork() == 0:
            channel.close()
            _supervise(fds)
        for received in fds:
            os.close(received)
    while kill_below(os.getpid()):
        time.sleep(0.001)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
