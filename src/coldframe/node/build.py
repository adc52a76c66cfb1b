"""Run the RUN steps of image builds in sandboxes of this node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coldframe.images.base import BuildStep, Image
from coldframe.node.life import Sandbox
from coldframe.protocol.models import ExecRequest, ExecResult, SandboxSpec

Begin = Callable[[SandboxSpec, Image], Sandbox]
"""Starts making a sandbox of an image that need not have a name."""


@dataclass(frozen=True)
class SandboxSteps:
    """See `RunStep`. Each step gets a sandbox of its own, counted in the ledger like any other."""

    begin: Begin
    ready: Callable[[Sandbox], Awaitable[object]]
    run: Callable[[Sandbox, ExecRequest], Awaitable[ExecResult]]
    end: Callable[[Sandbox], Awaitable[None]]

    async def __call__(self, step: BuildStep) -> ExecResult:
        """See `RunStep`."""
        spec = SandboxSpec(
            image=step.image.name,
            labels={"coldframe.build": step.image.name},
            ttl_s=step.deadline_s + 3600.0,
        )
        sandbox = self.begin(spec, step.image)
        try:
            await self.ready(sandbox)
            result = await self.run(sandbox, _request(step))
            if result.ok:
                await sandbox.require_ready().export_upper(step.target)
            return result
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
