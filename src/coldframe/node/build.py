"""Run the RUN steps of image builds in sandboxes of this node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coldframe.images.base import BuildStep, Image, StepResult
from coldframe.node.life import Sandbox
from coldframe.protocol.models import ExecRequest, ExecResult, SandboxSpec
from coldframe.protocol.network import EgressDecision, EgressEvent, NetworkPolicy
from coldframe.runtimes.base import SandboxHandle

_MOST_EVENTS = 8192
_MOST_REFUSALS = 5

Begin = Callable[[SandboxSpec, Image], Sandbox]
"""Starts making a sandbox of an image that need not have a name."""


@dataclass(frozen=True)
class SandboxSteps:
    """See `RunStep`. Each step gets a sandbox of its own, counted in the ledger like any other."""

    begin: Begin
    ready: Callable[[Sandbox], Awaitable[object]]
    run: Callable[[Sandbox, ExecRequest], Awaitable[ExecResult]]
    end: Callable[[Sandbox], Awaitable[None]]

    async def __call__(self, step: BuildStep) -> StepResult:
        """See `RunStep`."""
        spec = SandboxSpec(
            image=step.image.name,
            labels={"coldframe.build": step.image.name},
            ttl_s=step.deadline_s + 3600.0,
            network=step.network,
        )
        sandbox = self.begin(spec, step.image)
        try:
            await self.ready(sandbox)
            result = await self.run(sandbox, _request(step))
            refusals = () if step.network.empty else _refusals(sandbox.handle)
            if result.ok:
                handle = sandbox.require_ready()
                if not step.network.empty:
                    # What the policy has written in the sandbox is no part of the layer.
                    await handle.set_network(NetworkPolicy())
                await handle.export_upper(step.target)
            return StepResult(result, refusals)
        finally:
            await self.end(sandbox)


def _request(step: BuildStep) -> ExecRequest:
    return ExecRequest(
        argv=step.argv,
        command=step.command,
        env=dict(step.env),
        cwd=step.workdir,
        user=step.user,
        deadline_s=step.deadline_s,
    )


def _refusals(handle: SandboxHandle | None) -> tuple[str, ...]:
    """Say what the policy refused, each host once."""
    if handle is None:  # lost meanwhile
        return ()
    events = handle.egress_events(0, _MOST_EVENTS).events
    refused = [_sentence(event) for event in events if event.decision is EgressDecision.REFUSED]
    return tuple(dict.fromkeys(refused))[:_MOST_REFUSALS]


def _sentence(event: EgressEvent) -> str:
    host = event.name or event.address or "something"
    port = f" port {event.port}" if event.port and event.name is None else ""
    return f"refused {host}{port} ({event.reason})"
