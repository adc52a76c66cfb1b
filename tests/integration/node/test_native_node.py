"""The node on real sandboxes: nothing is lost, nothing is left, nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coldframe.host import census
from coldframe.host.spawner import Created
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node import fingerprints
from coldframe.node.life import ENDED
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import ColdframeError, NotKnownError, SandboxGoneError
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    Reason,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    SessionExecRequest,
    SessionRequest,
)
from coldframe.runtimes.image_changes import State
from coldframe.runtimes.native import NativeRuntime
from coldframe.runtimes.native_sandbox import NativeSandbox
from tests.fixtures.native import create_steps
from tests.fixtures.runtime import changes_of, fail_at, spawner_of
from tests.fixtures.waiting import until_asked
from tests.integration.node.conftest import DEEP, peak_rss_bytes

pytestmark = pytest.mark.root


def handle_of(node: Node, sandbox_id: str) -> NativeSandbox:
    """The runtime's side of a sandbox."""
    handle = node._works.register.find(sandbox_id).handle
    assert isinstance(handle, NativeSandbox)
    return handle


async def ended(node: Node, sandbox_id: str) -> SandboxInfo:
    """Wait until a sandbox is in a final state."""

    async def has_ended() -> bool:
        return (await node.get(sandbox_id)).state in ENDED

    await until_asked(has_ended)
    return await node.get(sandbox_id)


async def test_burst_of_sandboxes_all_answer_and_all_go(
    native_node: Node, spec: SandboxSpec
) -> None:
    """Alive at once, each with a pid namespace and an answer of its own."""
    infos = await asyncio.gather(*(native_node.create_sandbox(spec) for _ in range(40)))
    commands = [ExecRequest(command=f"echo {n}; readlink /proc/self/ns/pid") for n in range(40)]

    results = await asyncio.gather(
        *(native_node.exec(info.id, c) for info, c in zip(infos, commands, strict=True))
    )

    lines = [result.text.split() for result in results]
    assert [line[0] for line in lines] == [str(n) for n in range(40)]
    assert len({line[1] for line in lines}) == 40
    assert (await native_node.ledger()).live == 40
    await asyncio.gather(*(native_node.delete(info.id) for info in infos))
    ledger = await native_node.ledger()
    assert (ledger.created, ledger.deleted, ledger.leaks) == (40, 40, ())


async def test_exec_replayed_on_native_runs_once(native_node: Node, spec: SandboxSpec) -> None:
    """Also while the first still runs, and when its caller was cancelled."""
    sandbox = await native_node.create_sandbox(spec)
    request = ExecRequest(command="echo x >> /ran; sleep 0.1; cat /ran", operation_id="op-1")
    lost = asyncio.ensure_future(native_node.exec(sandbox.id, request))
    await asyncio.sleep(0.01)
    lost.cancel()

    results = await asyncio.gather(*(native_node.exec(sandbox.id, request) for _ in range(3)))

    assert {result.stdout for result in results} == {b"x\n"}


async def test_sandbox_whose_pid_1_is_killed_is_lost(native_node: Node, spec: SandboxSpec) -> None:
    """As by the OOM killer; commands end with what they printed."""
    sandbox = await native_node.create_sandbox(spec)
    operation = await native_node.start_exec(
        sandbox.id, ExecRequest(command="echo there; sleep 60")
    )
    await native_node.read_output(operation)

    os.kill(handle_of(native_node, sandbox.id).parts.created.pid, signal.SIGKILL)
    result = await native_node.wait_exec(operation)

    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"there\n")
    assert (await ended(native_node, sandbox.id)).state is SandboxState.LOST
    with pytest.raises(SandboxGoneError, match="was lost"):
        await native_node.exec(sandbox.id, ExecRequest(argv=("true",)))


async def test_sandbox_that_ends_in_the_moment_of_its_create_is_lost(
    native_node: Node, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end may be told before its create is known to have come out; it would live for ever."""
    runtime = native_node.runtime
    assert isinstance(runtime, NativeRuntime)
    told = asyncio.Event()
    lose, make = runtime._blanks.lose, runtime._maker._create

    def heard(sandbox_ids: Sequence[str]) -> None:
        lose(sandbox_ids)
        told.set()

    async def dying(*order: Any) -> Created:
        created = await make(*order)
        told.clear()
        os.kill(created.pid, signal.SIGKILL)
        await told.wait()
        return created

    monkeypatch.setattr(runtime._blanks, "lose", heard)
    monkeypatch.setattr(runtime._maker, "_create", dying)
    sandbox = await native_node.create_sandbox(spec)

    last = await ended(native_node, sandbox.id)
    assert (last.state, last.reason) == (SandboxState.LOST, "signal 9")


async def test_spawner_killed_amid_execs_leaves_nothing(
    native_node: Node, spec: SandboxSpec
) -> None:
    """Every command has a typed end, every sandbox is accounted for, and new ones can be made."""
    infos = await asyncio.gather(*(native_node.create_sandbox(spec) for _ in range(10)))
    request = ExecRequest(command="echo x; sleep 60")
    running = [asyncio.ensure_future(native_node.exec(info.id, request)) for info in infos * 10]
    await asyncio.sleep(0.05)
    assert isinstance(native_node.runtime, NativeRuntime)

    for pid in spawner_of(native_node.runtime).pids:
        os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*running, return_exceptions=True)

    for outcome in outcomes:
        if isinstance(outcome, ExecResult):
            assert outcome.reason in {Reason.SANDBOX_GONE, Reason.INFRASTRUCTURE}, outcome
        else:
            assert isinstance(outcome, ColdframeError), outcome
    for info in infos:
        assert (await ended(native_node, info.id)).state is SandboxState.LOST
    ledger = await native_node.ledger()
    assert (ledger.lost, ledger.live, ledger.leaked) == (10, 0, 0), ledger
    again = await native_node.create_sandbox(spec)
    assert (await native_node.exec(again.id, ExecRequest(argv=("true",)))).ok


async def test_output_outlives_its_sandbox_on_native(native_node: Node, spec: SandboxSpec) -> None:
    """More than the result holds can still be read, and the questions have answers."""
    sandbox = await native_node.create_sandbox(spec)
    command = "seq 1 200000; (sleep 60 &)"
    result = await native_node.exec(sandbox.id, ExecRequest(command=command, window_bytes=100))
    whole = b"".join(b"%d\n" % number for number in range(1, 200_001))
    assert result.out.total_bytes == len(whole)

    await native_node.delete(sandbox.id)

    chunk = await native_node.read_output(result.operation_id, "stdout", 500_000, 1000)
    assert chunk.data == whole[500_000 : 500_000 + len(chunk.data)] != b""
    assert await native_node.signal(result.operation_id, signal.SIGTERM) == 0
    assert await native_node.mark(result.operation_id) == (len(whole), 0)
    await native_node.forget(result.operation_id)


async def test_lease_on_native_is_enforced(native_node: Node, spec: SandboxSpec) -> None:
    """With a command in it."""
    sandbox = await native_node.create_sandbox(spec.model_copy(update={"ttl_s": 0.3}))
    result = await native_node.exec(sandbox.id, ExecRequest(command="echo x; sleep 60"))

    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"x\n")
    assert (await ended(native_node, sandbox.id)).expired


async def test_cancelled_creates_on_native_leave_nothing(
    native_node: Node, spec: SandboxSpec
) -> None:
    """At whatever step the cancellation comes."""
    for delay_ms in range(8):
        creating = asyncio.ensure_future(native_node.create_sandbox(spec))
        await asyncio.sleep(delay_ms / 1000)
        creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():
            await native_node.delete(creating.result().id)

    ledger = await native_node.ledger()
    assert (ledger.created, ledger.live) == (8, 0)
    assert ledger.balanced, ledger


async def test_create_that_fails_at_any_step_leaves_nothing(
    native_node: Node, spec: SandboxSpec
) -> None:
    """The ledger says failed, and the kernel has nothing of it."""
    runtime = native_node.runtime
    assert isinstance(runtime, NativeRuntime)
    steps = create_steps()
    for step in steps:
        fail_at(runtime, step)
        with pytest.raises(ColdframeError):
            await native_node.create_sandbox(spec)

    ledger = await native_node.ledger()
    assert ledger.failed == len(steps) > 3
    assert ledger.balanced, ledger


# --- fingerprints ---------------------------------------------------------------------

WORK = "mkdir /d; echo content > /d/f; ln -s f /d/l; rm /bin/cat; chmod 700 /tmp"


async def changed(node: Node, sandbox_id: str, command: str) -> None:
    """Run a command that must succeed."""
    result = await node.exec(sandbox_id, ExecRequest(command=command))
    assert result.ok, result.stderr


async def test_fingerprint_on_native_tells_states_not_histories(
    native_node: Node, spec: SandboxSpec
) -> None:
    """Equal for equal work, other after any change, the same after the way back."""
    one = (await native_node.create_sandbox(spec)).id
    other = (await native_node.create_sandbox(spec)).id
    fresh = await native_node.fingerprint(one)
    assert await native_node.fingerprint(other) == fresh

    await changed(native_node, one, "cp /etc/passwd /x; mv /x /etc/passwd; mkdir /y; rmdir /y")
    assert await native_node.fingerprint(one) == fresh
    await changed(native_node, one, WORK)
    await changed(native_node, other, WORK)
    worked = await native_node.fingerprint(one)
    assert worked != fresh
    assert await native_node.fingerprint(other) == worked

    for change in ("echo x >> /d/f", "rm /d/l", "chmod 711 /d", "mkdir /e", "rm /bin/ls"):
        before = await native_node.fingerprint(other)
        await changed(native_node, other, change)
        assert (await native_node.fingerprint(other)).files != before.files, change


def looked_at(handle: NativeSandbox) -> dict[bytes, State | None]:
    """What differs from the image."""
    with handle.upper.open() as upper:
        return changes_of(upper, handle.parts.layers, 60)


async def test_changes_list_what_differs_from_the_image(
    native_node: Node, spec: SandboxSpec
) -> None:
    """Removed, replaced, emptied and holes: each as what it is now."""
    sandbox = (await native_node.create_sandbox(spec)).id
    handle = handle_of(native_node, sandbox)
    assert looked_at(handle) == {}

    await changed(
        native_node,
        sandbox,
        "rm -r /etc; mkdir /etc; echo new > /etc/new; truncate -s 1099511627776 /hole; "
        "rm /bin/cat; head -c 4096 /dev/zero > /a; truncate -s 4096 /b",
    )
    changes = looked_at(handle)

    assert changes[b"/etc/passwd"] is None
    assert changes[b"/bin/cat"] is None
    assert changes[b"/etc/new"] is not None
    assert changes[b"/etc/new"][:2] == (b"file", b"644 0 0")
    assert changes[b"/a"] == changes[b"/b"]
    assert b"/hole" in changes
    assert b"/etc/group" not in changes or changes[b"/etc/group"] is None


async def test_fingerprint_of_a_deep_tree_costs_what_its_entries_do(
    native_node: Node, debian_image: Image
) -> None:
    """30,000 levels took 2 GiB and quadratic time of the host; ten levels make a path longer."""
    spec = SandboxSpec(image=debian_image.name)
    took: dict[int, float] = {}
    digests = set()
    for depth in (3_000, 30_000, 29_999):
        sandbox = (await native_node.create_sandbox(spec)).id
        made = await native_node.exec(
            sandbox, ExecRequest(argv=("python3", "-c", DEEP, str(depth)))
        )
        assert made.exit_code == 0, made.stderr
        before, began = peak_rss_bytes(), time.monotonic()
        digests.add((await native_node.fingerprint(sandbox)).files)
        took[depth] = time.monotonic() - began
        assert peak_rss_bytes() - before < 64 << 20

    assert len(digests) == 3
    assert took[30_000] < 30 * took[3_000]


async def test_fingerprint_that_takes_too_long_is_not_known(
    native_node: Node, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is told, and who is cancelled does not wait for the end of it."""
    sandbox = (await native_node.create_sandbox(spec)).id
    await changed(native_node, sandbox, "head -c 200000000 /dev/urandom > /large")
    looking = asyncio.ensure_future(native_node.fingerprint(sandbox))
    await asyncio.sleep(0.05)
    began = time.process_time()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert time.process_time() - began < 0.2

    monkeypatch.setattr(fingerprints, "LIMIT_S", 0.02)
    with pytest.raises(NotKnownError, match=r"within 0\.02 s"):
        await native_node.fingerprint(sandbox)


async def test_fingerprint_reads_no_more_of_users_than_users_need(
    native_node: Node, spec: SandboxSpec
) -> None:
    """A hole of 1 TiB costs nothing to make."""
    sandbox = (await native_node.create_sandbox(spec)).id
    await changed(native_node, sandbox, "truncate -s 1099511627776 /etc/passwd /etc/group")

    async with asyncio.timeout(60):
        one = await native_node.fingerprint(sandbox)
        assert await native_node.fingerprint(sandbox) == one


# --- death ----------------------------------------------------------------------------

_CHILD = """
import asyncio, sys
from pathlib import Path
from coldframe.images.store import ImageStore
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.models import ExecRequest, SandboxSpec

async def main():
    home, store, image = sys.argv[1:]
    node = Node(NodeSettings(home=Path(home)), images=ImageStore(Path(store)))
    await node.start()
    for _ in range(3):
        info = await node.create_sandbox(SandboxSpec(image=image, memory_bytes=1 << 28))
        await node.start_exec(info.id, ExecRequest(command="sleep 600 & setsid sleep 600"))
    print(node.id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_node_killed_is_reaped_by_the_next(
    tmp_path: Path, image_store: ImageStore, spec: SandboxSpec
) -> None:
    """kill -9 of the client: processes end with it, the rest goes when the next node starts."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CHILD,
        str(tmp_path),
        str(image_store.root),
        spec.image,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    node_id = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
    child.kill()
    await child.wait()

    async with Node(NodeSettings(home=tmp_path), images=image_store) as node:
        left = [path.name for path in (tmp_path / "nodes").iterdir()]
        assert left == [node.id]
        assert not [path for path in census.node_cgroups(node_id) if path.exists()]
        assert (await node.ledger()).balanced


# --- kept output ----------------------------------------------------------------------


def spools_on_disk(node: Node) -> int:
    """Bytes that the files of the node's spool take, whoever holds them; none has a name."""
    assert isinstance(node.runtime, NativeRuntime)
    found: dict[int, int] = {}
    for pid in (os.getpid(), *node.runtime._spawners.pids):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if f"/nodes/{node.id}/spool/" in str(fd.readlink()):
                    status = fd.stat()
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


async def test_spools_of_a_sandbox_stay_within_its_share_of_the_disk(
    tmp_path: Path, image_store: ImageStore, spec: SandboxSpec
) -> None:
    """Commands that write all they can must not fill it for everybody."""
    share = 64 << 20
    settings = NodeSettings(home=tmp_path, sandbox_spool_bytes=share, spool_bytes=16 << 20)
    async with Node(settings, images=image_store) as node:
        sandbox = await node.create_sandbox(spec)
        most = 0
        for n in range(12):
            flood = ExecRequest(
                command="head -c 20000000 /dev/zero; read x",
                stdin_open=True,
                operation_id=f"op-{n}",
            )
            await node.start_exec(sandbox.id, flood)
            while (await node.mark(f"op-{n}"))[0] < 20_000_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            most = max(most, spools_on_disk(node))
        assert 16 << 20 < most <= share

        for n in range(12):
            await node.close_stdin(f"op-{n}")
        await asyncio.gather(*(node.wait_exec(f"op-{n}") for n in range(12)))
        await node.exec(sandbox.id, ExecRequest(command="true"))
        assert spools_on_disk(node) <= settings.spool_bytes


async def test_session_command_that_ran_out_of_memory_says_so(
    native_node: Node, spec: SandboxSpec
) -> None:
    """An agent that reads `exit 137` looks for who killed it; the next command is no victim."""
    info = await native_node.create_sandbox(spec.model_copy(update={"memory_bytes": 64 << 20}))
    sessions = native_node.sessions()
    session = await sessions.create(info.id, SessionRequest())

    async def run(command: str) -> tuple[Reason, int | None]:
        told = await sessions.exec(session.id, SessionExecRequest(command=command, deadline_s=60))
        return told.result.reason, told.result.exit_code

    hog = "head -c 400000000 /dev/zero | tail -c 390000000 > /dev/null"
    assert await run(f"({hog}; exit $?)") == (Reason.OOM, 137)
    assert await run("(exit 137)") == (Reason.EXIT, 137)
    assert await run(f"{hog}; true") == (Reason.EXIT, 0)  # as of a command that is no session's
    assert await run("sh -c 'kill -9 $$'") == (Reason.EXIT, 137)
    await native_node.delete(info.id)
