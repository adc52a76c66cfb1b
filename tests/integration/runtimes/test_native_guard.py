"""Guarded directories of native sandboxes: whatever goes on there, no open waits for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import pytest_asyncio

from coldframe.client import AsyncSandbox, AsyncSandboxClient
from coldframe.host import guard, syscalls
from coldframe.host.fanotify import OPEN, Event, Listener
from coldframe.host.guard_judge import Judge
from coldframe.host.provenance import path_of
from coldframe.host.roottree import closing
from coldframe.protocol.errors import CapacityError
from coldframe.protocol.models import GuardReport
from coldframe.runtimes import native_guard

pytestmark = pytest.mark.root
WORD = "echo 1 > /guarded/word"
SOON_S = 20.0
"""Far more than it takes on a busy machine, and far less than for ever."""
FLOOD = (
    "import os\n"
    "names = [f'/tmp/{os.getpid()}-{i}' for i in range(2000)]\n"
    "for name in names:\n    open(name, 'w').close()\n"
    "open('/up', 'w').close()\n"
    "while True:\n    for name in names:\n        os.close(os.open(name, os.O_RDONLY))\n"
)
KNOCK = (
    "import os\nopen('/up', 'w').close()\n"
    "while True:\n    try:\n        os.open('/guarded/' + str(os.getpid()), os.O_CREAT)\n"
    "    except OSError:\n        pass\n"
)


@pytest_asyncio.fixture
async def sandbox(native_async_client: AsyncSandboxClient) -> AsyncSandbox:
    sandbox = await native_async_client.create_sandbox("debian:bookworm")
    await sandbox.exec("mkdir /guarded")
    return sandbox


async def leave(sandbox: AsyncSandbox, program: str, count: int = 3) -> None:
    """Leave so many survivors that run a Python program."""
    for _ in range(count):
        await sandbox.exec(
            f'rm -f /up; python3 -c "{program}" > /dev/null 2>&1 & '
            "until [ -e /up ]; do sleep 0.01; done"
        )


async def guarded(sandbox: AsyncSandbox, line: str) -> GuardReport:
    """Guard, run, and tell; and take the directory away again."""
    await sandbox.guard("/guarded", "op-guarded", ("word",))
    result = await sandbox.exec(line, operation_id="op-guarded", deadline_s=60)
    async with asyncio.timeout(SOON_S):
        report = await sandbox.guard_report()
    await sandbox.unguard()

    assert result.ok, result
    return report


def vouched(report: GuardReport) -> list[bytes]:
    return [file.content for file in report.files if file.vouched]


async def test_survivors_that_open_files_without_end_hold_up_no_report(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They open more than can be judged; whoever waited for the last of it waited for ever."""
    monkeypatch.setattr(guard, "MOST_AHEAD", 100)
    await leave(sandbox, FLOOD)
    report = await guarded(sandbox, f"sleep 0.5; {WORD}")

    assert not report.lost
    assert vouched(report) == [b"1\n"]


async def test_survivors_that_knock_hold_up_no_guard_whose_command_never_began(
    sandbox: AsyncSandbox,
) -> None:
    """Whether they are the command's nobody can say; they must not be waited for one by one."""
    await leave(sandbox, KNOCK)
    await sandbox.guard("/guarded", "op-guarded", ("word",))
    async with asyncio.timeout(SOON_S):
        while not (report := await sandbox.guard_report()).refused:
            pass
        late = await sandbox.exec(WORD)
        await sandbox.unguard()

    assert {one.outsider for one in report.refused} == {True}
    assert not late.ok


async def test_more_knocks_than_can_be_postponed_are_told_as_lost(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is known who the command is each of them holds a descriptor of the node's."""
    monkeypatch.setattr(guard, "MOST_POSTPONED", 0)
    await sandbox.guard("/guarded", "op-guarded", ("word",))
    knock = await sandbox.exec(WORD)
    report = await sandbox.guard_report()

    assert not knock.ok
    assert report.lost


async def test_command_whose_programs_end_before_they_are_judged_keeps_its_word_beside_others(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that has ended nobody can say whose it was; a busy node looks late."""
    follow = Judge.follow

    def follow_late(self: Judge, event: Event) -> None:
        time.sleep(0.002)
        follow(self, event)

    monkeypatch.setattr(Judge, "follow", follow_late)
    await leave(sandbox, "import time; open('/up', 'w'); time.sleep(1000)", 1)
    report = await guarded(sandbox, f"(echo '{WORD}' > /tmp/a); cp /tmp/a /tmp/b; sh /tmp/b")

    assert vouched(report) == [b"1\n"], report


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_fault_of_the_judge_holds_nobody_back_and_vouches_for_nothing(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends; an open that it never answered would never return."""

    def fail(self: Judge, event: Event) -> bool:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Judge, "admits", fail)
    report = await guarded(sandbox, f"{WORD}; cat /etc/passwd; {WORD}")

    assert report.lost
    assert not report.files


async def test_judge_that_does_not_come_back_holds_up_no_report(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may keep it waiting for what it asks about a process."""
    back = threading.Event()
    monkeypatch.setattr(guard, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(Judge, "ended", lambda _: back.wait(SOON_S) and {})
    await sandbox.guard("/guarded", "op-guarded", ("word",))
    report = await sandbox.guard_report()
    back.set()
    await sandbox.unguard()

    assert report.lost


async def test_more_than_a_ledger_may_remember_is_lost(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are made without end would take all the memory of the node."""
    monkeypatch.setattr(guard, "MOST_WAITING", 500)
    report = await guarded(
        sandbox, f"{WORD}; i=0; while [ $i -lt 600 ]; do i=$((i+1)); : > /tmp/$i; done; sleep 0.1"
    )

    assert report.lost


async def test_guard_for_which_there_is_no_group_is_refused_as_want_of_room(
    sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict must not go without its guard because many are taken at once."""

    def full(self: Listener) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Listener, "__init__", full)
        with pytest.raises(CapacityError, match="max_user_groups"):
            await sandbox.guard("/guarded", "op-refused", ("word",))

    assert vouched(await guarded(sandbox, WORD)) == [b"1\n"]


@pytest.fixture
def one_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node guard one directory at a time."""
    monkeypatch.setattr(native_guard, "MOST_AT_ONCE", 1)


async def test_guard_waits_until_the_kernel_has_let_go_of_another(
    one_guard: None, sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there are more at once than the kernel has groups for, and some are refused."""
    let_go = threading.Event()
    close = Listener.close

    def close_late(self: Listener) -> None:
        let_go.wait(SOON_S)
        close(self)

    monkeypatch.setattr(Listener, "close", close_late)
    await sandbox.guard("/guarded", "op-first", ("word",))
    await sandbox.unguard()
    second = asyncio.ensure_future(sandbox.guard("/guarded", "op-second", ("word",)))
    early, _ = await asyncio.wait({second}, timeout=0.2)
    let_go.set()
    await second
    await sandbox.unguard()

    assert not early


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing more for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        probe = os.dup(0)
        os.close(probe)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield


def test_open_for_which_there_is_no_descriptor_is_told() -> None:
    """The kernel forgets it; read together with others, it would do so in silence."""
    mount = syscalls.mount_detached("tmpfs", {"mode": "0755"}, 0)
    with closing(mount), closing(os.open(".", os.O_RDONLY, dir_fd=mount)) as top:
        listener = Listener()
        listener.watch(top, OPEN)
        for name in ("a", "b", "c"):
            place = f"/proc/{os.getpid()}/fd/{top}/{name}"
            subprocess.run(["sh", "-c", f": > {place}"], check=True, close_fds=False)
        first = listener.take()
        with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
            listener.take()
        last = listener.take()
        rest = listener.take()
        listener.close()

        assert first and last and rest is None
        assert [path_of(one.fd) for one in (first, last)] == [b"/a", b"/c"]
        for one in (first, last):
            os.close(one.fd)
