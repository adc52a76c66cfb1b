"""How sandboxes begin and end, and what each state takes."""

from __future__ import annotations

import asyncio

import pytest

from coldframe.node.life import ENDED, NEXT, Sandbox
from coldframe.node.node import Node
from coldframe.protocol.errors import (
    CapacityError,
    ClientClosedError,
    ConflictError,
    CreateError,
    InvalidRequestError,
    NameInUseError,
    QuotaError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxStateError,
)
from coldframe.protocol.models import (
    ExecRequest,
    Quota,
    Reason,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from coldframe.runtimes.fake import FakeRuntime
from tests.fixtures.waiting import until_asked
from tests.unit.node.conftest import SPEC, HeldRuntime, NodeMaker, ended, handle_of

TRUE = ExecRequest(argv=("true",))


# --- beginning ------------------------------------------------------------------------


async def test_create_returns_ready_sandbox_with_raised_version(node: Node) -> None:
    """requested, provisioning, ready: two transitions."""
    info = await node.create_sandbox(SandboxSpec(image="any", name="one", labels={"run": "r"}))

    assert (info.state, info.version) == (SandboxState.READY, 3)
    assert info.id.startswith(f"sb-{node.id}-")
    assert info.ready_at is not None
    assert info.expires_at == pytest.approx(info.created_at + 7200)
    assert await node.get("one") == info
    assert await node.list({"run": "r"}) == (info,)
    assert await node.list({"run": "other"}) == ()


async def test_list_looks_at_no_more_sandboxes_than_it_returns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of thousands costs a page."""
    made = [await node.create_sandbox(SPEC) for _ in range(5)]
    looks, look = [], Sandbox.info

    def counted(self: Sandbox) -> SandboxInfo:
        looks.append(self.id)
        return look(self)

    monkeypatch.setattr(Sandbox, "info", counted)
    place = (made[1].created_at, made[1].id)
    page = await node.list(after=place, limit=2)

    assert [one.id for one in page] == looks == [one.id for one in made[2:4]]


async def test_create_that_fails_is_counted_and_leaves_nothing(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """The caller gets the runtime's typed error; the ledger still balances."""
    node = await make_node(held)
    held.create_error = CreateError("step 3 failed")

    with pytest.raises(CreateError, match="step 3 failed"):
        await node.create_sandbox(SPEC)

    ledger = await node.ledger()
    assert (ledger.created, ledger.failed, ledger.live) == (1, 1, 0)
    assert ledger.balanced


async def test_creates_that_the_node_has_no_room_for_count_nothing(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """Also of many that ask in one moment: what is counted has an id, and can be asked about."""
    node = await make_node(held, create_slots=1, queue_limit=1, max_sandboxes=3)
    spec = SandboxSpec(image="any", labels={"owner": "one"})
    held.gate.clear()
    asked = [asyncio.ensure_future(node.create_sandbox(spec)) for _ in range(6)]
    await until_asked(lambda: _made(held, 1))
    held.gate.set()

    answers = await asyncio.gather(*asked, return_exceptions=True)
    with pytest.raises(QuotaError):
        await node.create_sandbox(spec, quota=Quota(sandboxes=2))
    await node.create_sandbox(spec)
    with pytest.raises(CapacityError):
        await node.create_sandbox(spec)

    assert [type(answer) for answer in answers[2:]] == [CapacityError] * 4
    ledger = await node.ledger()
    assert (ledger.created, ledger.failed, ledger.live) == (3, 0, 3)


async def test_create_with_untyped_fault_becomes_create_error(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """Callers sort failures by type; a stray OSError would be nobody's."""
    node = await make_node(held)
    held.create_error = OSError(28, "No space left on device")

    with pytest.raises(CreateError, match="No space left"):
        await node.create_sandbox(SPEC)


async def test_create_cancelled_leaves_nothing(make_node: NodeMaker, held: HeldRuntime) -> None:
    """Nobody knows the id, so nobody else could delete it."""
    node = await make_node(held)
    held.gate.clear()
    creating = asyncio.ensure_future(node.create_sandbox(SPEC))
    await until_asked(lambda: _made(held, 1))

    creating.cancel()
    await asyncio.sleep(0)
    held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await creating

    await until_asked(lambda: _balanced_without_live(node))
    assert (await node.ledger()).failed == 1


async def test_create_cancelled_before_its_turn_leaves_nothing(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """It waits behind others and is given up there."""
    node = await make_node(held, create_slots=1)
    held.gate.clear()
    first = asyncio.ensure_future(node.create_sandbox(SPEC))
    second = asyncio.ensure_future(node.create_sandbox(SPEC))
    await until_asked(lambda: _made(held, 1))

    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    held.gate.set()
    await first

    assert held.creates == 1
    ledger = await node.ledger()
    assert (ledger.failed, ledger.live) == (1, 1)
    assert ledger.balanced


async def _made(held: HeldRuntime, number: int) -> bool:
    return held.creates == number


async def _balanced_without_live(node: Node) -> bool:
    ledger = await node.ledger()
    return ledger.balanced and ledger.live == 0


async def test_create_waits_its_turn_and_says_how_long(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """T_run is split into queue, create and the rest."""
    node = await make_node(held, create_slots=1)
    held.gate.clear()
    creates = [asyncio.ensure_future(node.create_sandbox(SPEC)) for _ in range(3)]
    await until_asked(lambda: _made(held, 1))
    held.gate.set()

    infos = await asyncio.gather(*creates)

    assert infos[0].queued_s == 0.0
    assert 0 < infos[1].queued_s < infos[2].queued_s


async def test_create_beyond_limits_is_refused(make_node: NodeMaker) -> None:
    """Refused at once, with nothing recorded."""
    node = await make_node(max_sandboxes=1)
    await node.create_sandbox(SPEC)

    with pytest.raises(CapacityError, match="1 sandboxes are alive"):
        await node.create_sandbox(SPEC)

    assert (await node.ledger()).created == 1


async def test_name_is_unique_among_live_only(node: Node) -> None:
    """A name can be used again once its bearer has ended."""
    spec = SandboxSpec(image="any", name="one")
    first = await node.create_sandbox(spec)

    with pytest.raises(NameInUseError, match="one"):
        await node.create_sandbox(spec)
    await node.delete("one")
    second = await node.create_sandbox(spec)

    assert (await node.get("one")).id == second.id != first.id
    with pytest.raises(SandboxNotFoundError, match="two"):
        await node.get("two")


async def test_quota_is_exact_when_many_ask_at_once(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """Never one over it, and no place is lost to what failed, ended or was refused."""
    node, runtime = await make_node(held), held
    quota = Quota(sandboxes=5, cpu=0.3)
    spec = SandboxSpec(image="any", cpu=0.1, labels={"owner": "amber"})

    async def burst() -> list[str]:
        asked = (node.create_sandbox(spec, quota=quota) for _ in range(50))
        got = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in got if isinstance(one, BaseException)]
        assert all(isinstance(one, QuotaError) for one in refused)
        return [one.id for one in got if not isinstance(one, BaseException)]

    for _ in range(3):
        made = await burst()
        assert len(made) == 3
        await asyncio.gather(*(node.delete(one) for one in made))
    runtime.create_error = OSError("no")
    ends = await asyncio.gather(
        *(node.create_sandbox(spec, quota=quota) for _ in range(9)), return_exceptions=True
    )
    assert {type(one) for one in ends} == {CreateError, QuotaError}
    runtime.create_error = None
    made = await burst()
    assert len(made) == 3
    await asyncio.gather(*(node.delete(one) for one in made))
    await node.create_sandbox(SPEC.model_copy(update={"labels": {"owner": "blue"}}), quota=Quota())
    with pytest.raises(InvalidRequestError, match="disk_bytes"):
        await node.create_sandbox(spec, quota=Quota(disk_bytes=1 << 30))


# --- ending ---------------------------------------------------------------------------


async def test_delete_twice_is_fine(node: Node) -> None:
    """Retries of a delete whose answer was lost must not fail."""
    info = await node.create_sandbox(SPEC)

    answers = await asyncio.gather(node.delete(info.id), node.delete(info.id))
    again = await node.delete(info.id)

    assert {answer.state for answer in (*answers, again)} == {SandboxState.DELETED}
    assert again.version == 5
    assert (await node.ledger()).deleted == 1


async def test_delete_while_provisioning_ends_in_failed(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """Somebody saw it in the list and wants it gone."""
    node = await make_node(held)
    held.gate.clear()
    creating = asyncio.ensure_future(node.create_sandbox(SPEC, operation_id="op-1"))
    await until_asked(lambda: _made(held, 1))
    (info,) = await node.list()

    deleting = asyncio.ensure_future(node.delete(info.id))
    await asyncio.sleep(0)
    held.gate.set()

    assert (await deleting).state is SandboxState.FAILED
    with pytest.raises(SandboxGoneError, match="deleted before it was ready"):
        await creating
    assert (await node.ledger()).balanced


async def test_delete_in_the_moment_of_the_create_ends_by_type(node: Node) -> None:
    """Neither a hang nor a cancellation of somebody who was not cancelled."""
    creating = asyncio.ensure_future(node.create_sandbox(SPEC, operation_id="op-1"))
    await asyncio.sleep(0)
    (info,) = await node.list()
    assert info.state is SandboxState.PROVISIONING

    assert (await node.delete(info.id)).state is SandboxState.FAILED

    with pytest.raises(SandboxGoneError, match="before it was ready"):
        await creating
    assert (await node.ledger()).balanced


async def test_delete_that_fails_can_be_tried_again(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """It stays `terminating`, counts as live, and takes no operation."""
    node = await make_node(held)
    info = await node.create_sandbox(SPEC)
    held.destroy_error = OSError("busy")

    with pytest.raises(SandboxStateError, match="busy"):
        await node.delete(info.id)
    with pytest.raises(SandboxStateError, match="terminating"):
        await node.exec(info.id, TRUE)
    assert (await node.ledger()).live == 1
    held.destroy_error = None

    assert (await node.delete(info.id)).state is SandboxState.DELETED


async def test_terminating_sandbox_refuses_operations_and_answers_questions(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """Questions go on being answered until the end, and after it."""
    node = await make_node(held)
    info = await node.create_sandbox(SPEC)
    held.destroy_error = OSError("busy")
    with pytest.raises(SandboxStateError):
        await node.delete(info.id)

    refused = (
        node.exec(info.id, TRUE),
        node.start_exec(info.id, TRUE),
        node.renew(info.id, 10),
        node.processes(info.id),
        node.listening_ports(info.id),
        node.kill_processes(info.id),
        node.connect(info.id, 80),
        node.fingerprint(info.id),
        node.files(info.id).stat("/"),
    )
    for operation in refused:
        with pytest.raises(SandboxStateError, match="is terminating"):
            await operation
    assert (await node.get(info.id)).state is SandboxState.TERMINATING
    held.destroy_error = None


async def test_ended_sandbox_refuses_operations_as_gone(node: Node) -> None:
    """Also the files object that was taken while it lived."""
    info = await node.create_sandbox(SPEC)
    files = node.files(info.id)
    await node.delete(info.id)

    with pytest.raises(SandboxGoneError, match="was deleted"):
        await node.exec(info.id, TRUE)
    with pytest.raises(SandboxGoneError, match="was deleted"):
        await files.stat("/")
    with pytest.raises(SandboxGoneError, match="was deleted"):
        await node.renew(info.id, 10)


async def test_expected_version_that_is_stale_is_a_conflict(node: Node) -> None:
    """An operation that was decided on another state does not run."""
    info = await node.create_sandbox(SPEC)

    with pytest.raises(ConflictError, match="version 3, not 2"):
        await node.exec(info.id, ExecRequest(argv=("true",), expected_version=2))
    with pytest.raises(ConflictError):
        await node.renew(info.id, 10, expected_version=2)
    with pytest.raises(ConflictError):
        await node.delete(info.id, expected_version=2)

    assert (await node.exec(info.id, ExecRequest(argv=("true",), expected_version=3))).ok
    assert (await node.delete(info.id, expected_version=3)).state is SandboxState.DELETED


def test_table_of_transitions_is_closed() -> None:
    """Every state is there, final ones lead nowhere, every other can end."""
    assert set(NEXT) == set(SandboxState)
    assert {state for state, after in NEXT.items() if not after} == set(ENDED)

    def reaches_end(state: SandboxState, seen: frozenset[SandboxState]) -> bool:
        after = NEXT[state] - seen
        return state in ENDED or any(reaches_end(s, seen | {state}) for s in after)

    assert all(reaches_end(state, frozenset()) for state in SandboxState)


# --- loss -----------------------------------------------------------------------------


async def test_sandbox_that_dies_is_lost_and_its_execs_end(node: Node) -> None:
    """An OOM kill of pid 1 must never hang a rollout."""
    info = await node.create_sandbox(SPEC)
    operation = await node.start_exec(info.id, ExecRequest(command="echo there; sleep 60"))
    await node.read_output(operation)

    handle_of(node, info.id).die("oom")
    result = await node.wait_exec(operation)

    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"there\n")
    last = await node.get(info.id)
    assert (last.state, last.reason) == (SandboxState.LOST, "oom")
    with pytest.raises(SandboxGoneError, match="was lost: oom"):
        await node.exec(info.id, TRUE)
    assert (await node.delete(info.id)).state is SandboxState.LOST
    ledger = await node.ledger()
    assert (ledger.lost, ledger.live) == (1, 0)
    assert ledger.balanced


async def test_runtime_that_dies_loses_all_sandboxes(node: Node) -> None:
    """The spawner is gone: every sandbox is lost, none is forgotten."""
    infos = [await node.create_sandbox(SPEC) for _ in range(3)]
    assert isinstance(node.runtime, FakeRuntime)
    assert node.runtime._zygote is not None

    node.runtime._zygote.kill()

    for info in infos:
        assert (await ended(node, info.id)).reason == "spawner lost"
    ledger = await node.ledger()
    assert (ledger.lost, ledger.live) == (3, 0)
    assert ledger.balanced


# --- close ----------------------------------------------------------------------------


async def test_close_ends_everything_and_reports_what_it_could_not(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """One destroy that fails must not save the others."""
    node = await make_node(held)
    stubborn = await node.create_sandbox(SPEC)
    others = [await node.create_sandbox(SPEC) for _ in range(3)]

    async def fails() -> None:
        raise OSError("busy")

    handle_of(node, stubborn.id).destroy = fails  # type: ignore[method-assign]
    report = await node.close()

    assert report.ended == len(others)
    assert any("busy" in failure for failure in report.failures)
    assert not (node.settings.home / "nodes" / node.id).exists()


async def test_ends_that_take_long_hold_up_no_other(
    make_node: NodeMaker, held: HeldRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox can have the kernel undo things for minutes when it is killed."""
    monkeypatch.setattr("coldframe.node.sandboxes.DESTROY_HOLD_S", 0.05)
    node = await make_node(held, create_slots=1)
    slow, quick = [await node.create_sandbox(SPEC) for _ in range(2)]
    handle, killed = handle_of(node, slow.id), asyncio.Event()
    destroy = handle.destroy

    async def when_killed() -> None:
        await killed.wait()
        await destroy()

    handle.destroy = when_killed  # type: ignore[method-assign]
    ending = asyncio.ensure_future(node.delete(slow.id))
    await until_asked(lambda: _is_in(node, slow.id, SandboxState.TERMINATING))

    try:
        async with asyncio.timeout(10):
            assert (await node.delete(quick.id)).state is SandboxState.DELETED
    finally:
        killed.set()
    assert (await ending).state is SandboxState.DELETED


async def _is_in(node: Node, sandbox_id: str, state: SandboxState) -> bool:
    return (await node.get(sandbox_id)).state is state


async def test_close_while_creating_leaves_nothing(make_node: NodeMaker, held: HeldRuntime) -> None:
    """A client that is closed in the middle of a burst."""
    node = await make_node(held, create_slots=1)
    held.gate.clear()
    creates = [asyncio.ensure_future(node.create_sandbox(SPEC)) for _ in range(3)]
    await until_asked(lambda: _made(held, 1))
    base = held.base

    closing = asyncio.ensure_future(node.close())
    await asyncio.sleep(0)
    held.gate.set()
    await closing

    outcomes = await asyncio.gather(*creates, return_exceptions=True)
    assert all(isinstance(outcome, SandboxGoneError) for outcome in outcomes), outcomes
    assert not base.exists()


async def test_node_that_is_closed_refuses_by_type(node: Node) -> None:
    """Not by an AttributeError. Closing twice is fine."""
    info = await node.create_sandbox(SPEC)
    await node.close()
    await node.close()

    with pytest.raises(ClientClosedError):
        await node.create_sandbox(SPEC)
    with pytest.raises(ClientClosedError):
        await node.get(info.id)
    with pytest.raises(ClientClosedError):
        node.capabilities()


async def test_ended_records_are_bounded(make_node: NodeMaker) -> None:
    """A node that runs for weeks must not remember every sandbox."""
    node = await make_node(ended_count=2)
    ids = []
    for _ in range(3):
        info = await node.create_sandbox(SPEC)
        await node.delete(info.id)
        ids.append(info.id)

    with pytest.raises(SandboxNotFoundError):
        await node.get(ids[0])
    assert (await node.get(ids[2])).state is SandboxState.DELETED
    assert (await node.ledger()).deleted == 3


async def test_records_of_one_owner_push_out_nobody_elses(make_node: NodeMaker) -> None:
    """What became of a sandbox must be known however many others make and delete."""
    for bound in ({"ended_count": 4}, {"ended_bytes": 1 << 20}):
        node = await make_node(**bound)
        large = {"X": "x" * 200_000} if "ended_bytes" in bound else {}

        async def ended(node: Node, owner: str, env: dict[str, str]) -> str:
            labels = {"labels": {"owner": owner}, "env": env}
            info = await node.create_sandbox(SPEC.model_copy(update=labels))
            return (await node.delete(info.id)).id

        amber = await ended(node, "amber", {})
        blue = [await ended(node, "blue", large) for _ in range(8)]

        assert (await node.get(amber)).state is SandboxState.DELETED
        assert (await node.get(blue[-1])).state is SandboxState.DELETED
        with pytest.raises(SandboxNotFoundError):
            await node.get(blue[2])


async def test_environments_of_one_owner_are_bounded_while_its_sandboxes_live(
    make_node: NodeMaker,
) -> None:
    """Thousands of sandboxes of a MiB of environment each would be the node's memory."""
    node = await make_node(owner_window_bytes=1 << 20)
    large = SPEC.model_copy(update={"env": {"X": "x" * 400_000}, "labels": {"owner": "amber"}})
    first = await node.create_sandbox(large)
    await node.create_sandbox(large)
    with pytest.raises(CapacityError, match="environments of sandboxes of owner 'amber'"):
        await node.create_sandbox(large)
    assert (await node.ledger()).created == 2
    await node.create_sandbox(large.model_copy(update={"labels": {"owner": "blue"}}))

    await node.delete(first.id)
    await node.create_sandbox(large)
