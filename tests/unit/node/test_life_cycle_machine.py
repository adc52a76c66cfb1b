"""Whatever is done in whatever order, the ledger is exact and every state is a legal one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from coldframe.node.life import ENDED, NEXT
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    ConflictError,
    NameInUseError,
    SandboxGoneError,
    SandboxStateError,
)
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    Reason,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from coldframe.runtimes.fake import FakeRuntime
from tests.fixtures.waiting import until_asked

_MAX = 4
_KEPT_S = 3600.0
_ENDINGS = {Reason.EXIT, Reason.SANDBOX_GONE, Reason.SIGNAL}


def _reachable(state: SandboxState) -> set[SandboxState]:
    found, waiting = {state}, [state]
    while waiting:
        for after in NEXT[waiting.pop()] - found:
            found.add(after)
            waiting.append(after)
    return found


class LifeCycle(RuleBasedStateMachine):
    """Creates, commands, renewals, expiries, losses and deletes of a few sandboxes."""

    sandboxes: Bundle[str] = Bundle("sandboxes")
    running: Bundle[tuple[str, str]] = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.home = tempfile.TemporaryDirectory()
        self.seen: dict[str, SandboxInfo] = {}
        self.created = 0
        self.results: dict[str, ExecResult] = {}

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end, or say that it hangs."""

        async def bounded() -> Any:
            async with asyncio.timeout(20):
                return await coroutine

        return self.loop.run_until_complete(bounded())

    @initialize()
    def start(self) -> None:
        self.node = Node(
            NodeSettings(
                home=Path(self.home.name), runtime="fake", max_sandboxes=_MAX, quarantine_s=_KEPT_S
            )
        )
        self.run(self.node.start())

    def teardown(self) -> None:
        if hasattr(self, "node"):
            runtime = self.node.runtime
            assert isinstance(runtime, FakeRuntime)
            base = runtime.base
            report = self.run(self.node.close())
            assert report.failures == ()
            assert not base.exists()
        self.loop.close()
        self.home.cleanup()

    # --- rules ------------------------------------------------------------------------

    @rule(target=sandboxes, name=st.sampled_from([None, "one", "two"]))
    def create(self, name: str | None) -> Any:
        live = self.run(self.node.list())
        try:
            info = self.run(self.node.create_sandbox(SandboxSpec(image="any", name=name)))
        except CapacityError:
            assert len(live) == _MAX
            return multiple()
        except NameInUseError:
            assert name in {info.spec.name for info in live}
            return multiple()
        self.created += 1
        assert info.state is SandboxState.READY
        return info.id

    @rule(target=sandboxes, data=st.data())
    def create_and_cancel(self, data: st.DataObject) -> Any:
        steps = data.draw(st.integers(0, 6))

        async def cancelled() -> str | None:
            creating = asyncio.ensure_future(self.node.create_sandbox(SandboxSpec(image="any")))
            for _ in range(steps):
                await asyncio.sleep(0)
            creating.cancel()
            await asyncio.wait([creating])
            if creating.cancelled() or isinstance(creating.exception(), ColdframeError):
                return None
            return creating.result().id

        before = self.run(self.node.ledger()).created
        made = self.run(cancelled())
        self.created += self.run(self.node.ledger()).created - before
        return multiple() if made is None else made

    @rule(sandbox=sandboxes)
    def run_command(self, sandbox: str) -> None:
        info = self.run(self.node.get(sandbox))
        try:
            result = self.run(self.node.exec(sandbox, ExecRequest(command="echo out")))
        except (SandboxGoneError, SandboxStateError):
            assert info.state is not SandboxState.READY
        else:
            assert info.state is SandboxState.READY
            assert result.stdout == b"out\n"

    @rule(target=running, sandbox=sandboxes)
    def start_command(self, sandbox: str) -> Any:
        try:
            request = ExecRequest(command="echo out; exec sleep 60")
            operation = self.run(self.node.start_exec(sandbox, request))
        except (SandboxGoneError, SandboxStateError):
            return multiple()
        return sandbox, operation

    @rule(command=running)
    def wait_for_command(self, command: tuple[str, str]) -> None:
        sandbox, operation = command
        if self.run(self.node.get(sandbox)).state is SandboxState.READY:
            self.run(self.node.signal(operation, 9))
        result = self.run(self.node.wait_exec(operation))
        assert result.reason in _ENDINGS
        assert self.results.setdefault(operation, result) is result

    @rule(sandbox=sandboxes, ttl_s=st.sampled_from([0.001, 3600.0, None]))
    def renew(self, sandbox: str, ttl_s: float | None) -> None:
        try:
            self.run(self.node.renew(sandbox, ttl_s))
        except (SandboxGoneError, SandboxStateError):
            return
        if ttl_s == 0.001:
            self.run(self.lapsed(sandbox))
            info = self.run(self.node.get(sandbox))
            assert (info.state, info.expired) == (SandboxState.TERMINATING, True)
            assert self.run(self.node.files(sandbox).list("/"))

    async def lapsed(self, sandbox: str) -> None:
        """Wait until a lease has ended, and what ran was killed."""

        async def is_kept() -> bool:
            return (await self.node.get(sandbox)).kept_until is not None

        await until_asked(is_kept)

    async def ended(self, sandbox: str) -> None:
        """Wait until a lease has done its work."""

        async def has_ended() -> bool:
            return (await self.node.get(sandbox)).state in ENDED

        await until_asked(has_ended)

    @rule(sandbox=sandboxes)
    def lose(self, sandbox: str) -> None:
        runtime = self.node.runtime
        assert isinstance(runtime, FakeRuntime)
        handle = runtime._sandboxes.get(sandbox)
        if handle is not None:
            handle.die("oom")
            self.run(self.ended(sandbox))
            info = self.run(self.node.get(sandbox))
            kept = info.kept_until is not None
            assert info.state is (SandboxState.DELETED if kept else SandboxState.LOST)

    @rule(sandbox=consumes(sandboxes), at_once=st.booleans(), stale=st.booleans())
    def delete(self, sandbox: str, at_once: bool, stale: bool) -> None:
        info = self.run(self.node.get(sandbox))
        if stale and info.state not in ENDED:
            try:
                self.run(self.node.delete(sandbox, expected_version=info.version - 1))
            except ConflictError:
                assert self.run(self.node.get(sandbox)).version == info.version
            else:
                raise AssertionError("a stale version was taken")

        async def both() -> None:
            deletes = [self.node.delete(sandbox) for _ in range(2)]
            if at_once:
                await asyncio.gather(*deletes)
            else:
                for delete in deletes:
                    await delete

        self.run(both())
        assert self.run(self.node.get(sandbox)).state in ENDED

    # --- what always holds ------------------------------------------------------------

    @invariant()
    def ledger_is_exact(self) -> None:
        if not hasattr(self, "node"):
            return
        before = len(self.run(self.node.list()))
        ledger = self.run(self.node.ledger())
        assert ledger.balanced, ledger
        assert ledger.created == self.created
        # One that is kept for a while may end between the questions.
        assert len(self.run(self.node.list())) <= ledger.live <= before <= _MAX

    @invariant()
    def versions_only_rise_and_states_follow_the_table(self) -> None:
        if not hasattr(self, "node"):
            return
        for info in [*self.run(self.node.list()), *self.seen.values()]:
            now = self.run(self.node.get(info.id))
            before = self.seen.get(info.id, now)
            assert now.version >= before.version
            assert now.state in _reachable(before.state)
            assert (now.state == before.state) == (now.version == before.version)
            self.seen[info.id] = now


LifeCycle.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLifeCycle = LifeCycle.TestCase
