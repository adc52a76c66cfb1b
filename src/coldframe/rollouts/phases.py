"""Move an attempt from phase to phase, and keep the record of each.

Every phase has a user, a network policy and files of its own. What ends a phase kills what must
not live on and says so; what begins one puts its policy in force before anything of it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import ProcessInfo
from coldframe.protocol.network import EgressEvent, NetworkPolicy
from coldframe.trajectories.files import ChangedFiles
from coldframe.trajectories.phases import Egress, EgressDecided, PhaseRecord
from coldframe.trajectories.recorder import Recorder, plain_process, plain_text
from coldframe.trajectories.steps import Step

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox
    from coldframe.rollouts.task import Task

PhaseName = Literal["build", "start", "agent", "verify"]
MAX_EVENTS = 1000
"""Decisions that are kept of one phase; all are counted."""
PAGE = 1000
READ_S = 30.0
"""For reading a phase's decisions: a node that hangs must not keep its sandbox from deletion."""
LISTED = 1000
"""Processes that a phase's end lists."""


@dataclass
class _Open:
    name: PhaseName
    sandbox: AsyncSandbox
    step: str | None
    user: str | None
    network: NetworkPolicy
    visible: tuple[str, ...]
    started_at: float
    cursor: int


@dataclass
class PhaseLog:
    """The phases of one attempt, in order. `unknown` holds what could not be learnt of them."""

    recorder: Recorder
    unknown: dict[str, str] = field(default_factory=dict)
    _done: list[PhaseRecord] = field(default_factory=list)
    _open: _Open | None = None
    _cursors: dict[str, int] = field(default_factory=dict)

    @property
    def records(self) -> tuple[PhaseRecord, ...]:
        """All phases that have ended."""
        return tuple(self._done)

    def built(self, *, network: NetworkPolicy, started_at: float) -> None:
        """Note the build of the image, which this attempt waited for."""
        self._done.append(
            PhaseRecord(
                name="build",
                user="root",
                network=policy_texts(network),
                started_at=started_at,
                ended_at=time.time(),
            )
        )

    async def begin(
        self,
        name: PhaseName,
        sandbox: AsyncSandbox,
        *,
        user: str | int | None,
        network: NetworkPolicy,
        step: str | None = None,
        visible: Sequence[str] = (),
    ) -> None:
        """Put a phase's policy in force and open its record.

        Raises:
            CapabilityError: the runtime cannot enforce the policy.
            SandboxGoneError: the sandbox ended.
        """
        if sandbox.info.spec.network != network:
            await sandbox.set_network(network)
        self._open = _Open(
            name,
            sandbox,
            step,
            None if user is None else str(user),
            network,
            tuple(visible),
            time.time(),
            self._cursors.get(sandbox.id, 0),
        )

    async def end(
        self,
        *,
        killed: Iterable[ProcessInfo] = (),
        survivors: Iterable[ProcessInfo] = (),
        files: ChangedFiles | str | None = None,
    ) -> None:
        """Close the record of the phase that is open; its egress is read now.

        `files` is what became of the files since the last look at them, or why it is not known.
        """
        current, self._open = self._open, None
        if current is None:
            return
        egress = Egress()
        try:
            async with asyncio.timeout(READ_S):
                egress = await self._egress(current)
        except (ColdframeError, TimeoutError) as error:
            # Decisions end with their sandbox; a phase that ended so has lost them.
            why = plain_text(str(error)) or f"not read within {READ_S:g} s"
            self.unknown[f"phases.{len(self._done)}.egress"] = why
        if isinstance(files, str):
            self.unknown[f"phases.{len(self._done)}.files"] = files
        self._done.append(
            PhaseRecord(
                name=current.name,
                step=current.step,
                sandbox_id=current.sandbox.id,
                user=current.user,
                network=policy_texts(current.network),
                visible=current.visible,
                started_at=current.started_at,
                ended_at=time.time(),
                killed=tuple(map(plain_process, killed))[:LISTED],
                survivors=tuple(map(plain_process, survivors))[:LISTED],
                egress=egress,
                files=files if isinstance(files, ChangedFiles) else None,
            )
        )

    async def _egress(self, phase: _Open) -> Egress:
        counts: Counter[str] = Counter()
        kept: list[EgressDecided] = []
        lost = total = out = into = 0
        cursor = phase.cursor
        while True:
            page = await phase.sandbox.egress_events(cursor, PAGE)
            lost += page.dropped
            cursor = page.next_cursor
            for event in page.events:
                total += 1
                counts[f"{event.kind}.{event.decision}"] += 1
                out, into = out + event.bytes_out, into + event.bytes_in
                if len(kept) < MAX_EVENTS:
                    kept.append(self._decided(event))
            if len(page.events) < PAGE:
                break
        self._cursors[phase.sandbox.id] = cursor
        return Egress(
            counts=dict(sorted(counts.items())),
            bytes_out=out,
            bytes_in=into,
            events=tuple(kept),
            left_out=total - len(kept),
            lost=lost,
        )

    def _decided(self, event: EgressEvent) -> EgressDecided:
        redact = self.recorder.redactor.text

        def clean(text: str | None) -> str | None:
            return None if text is None else redact(plain_text(text))

        return EgressDecided(
            at=event.at,
            step=_step_at(self.recorder.steps, event.at),
            kind=event.kind,
            decision=event.decision,
            connection=event.connection,
            name=clean(event.name),
            address=event.address,
            port=event.port,
            rule=clean(event.rule),
            reason=clean(event.reason) or "",
            bytes_out=event.bytes_out,
            bytes_in=event.bytes_in,
        )


def _step_at(steps: Sequence[Step], at: float) -> int | None:
    for one in steps:
        begun, ended = one.started_at, one.ended_at
        if begun is not None and ended is not None and begun <= at <= ended:
            return one.index
    return None


def policy_texts(policy: NetworkPolicy) -> tuple[str, ...]:
    """Return what a policy allows, one text per rule; no credential's value is in it."""
    texts = ["public"] if policy.public else []
    if policy.presets:
        texts.append(f"presets:{','.join(policy.presets)}")
    texts += [str(rule) for rule in policy.rules]
    texts += [f"credential {one.header} for {one.host}" for one in policy.credentials]
    if policy.rate_bytes_s is not None:
        texts.append(f"at most {policy.rate_bytes_s} bytes/s")
    if policy.max_bytes is not None:
        texts.append(f"at most {policy.max_bytes} bytes")
    return tuple(texts)


def first_policy(task: Task) -> str | None:
    """Return the first policy of a task that allows anything, as text; None if none does."""
    policies = [("[environment]", task.environment.network)]
    for step in task.steps:
        of = "" if step.name is None else f" of step {step.name!r}"
        policies.append((f"[agent]{of}", step.agent.network))
        policies.append((f"[verifier]{of}", step.verifier.network))
    for where, policy in policies:
        if not policy.empty:
            return f"{where} has the network {', '.join(policy_texts(policy))}"
    return None


async def kill_what_must_not_live_on(
    sandbox: AsyncSandbox, operations: Iterable[str], *, everything: bool
) -> tuple[list[ProcessInfo], tuple[ProcessInfo, ...]]:
    """Kill these operations with all that they started, or everything but pid 1.

    Returns:
        What is dead now, and what lives on.
    """
    killed: list[ProcessInfo] = []
    for operation_id in sorted(operations):
        killed += await sandbox.kill_processes(operation_id)
    if everything:
        killed += await sandbox.kill_processes()
    return killed, await sandbox.processes()
