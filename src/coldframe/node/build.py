"""Images of a node's store, and builds into it, whose RUN steps run in sandboxes of the node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldframe.images.base import BuildStep, Image, StepResult
from coldframe.images.store import ImageStore
from coldframe.node.assembly import ImageResolver
from coldframe.node.life import Sandbox
from coldframe.protocol.errors import CapabilityError, ImageError
from coldframe.protocol.models import ExecRequest, ExecResult, ImageInfo, SandboxSpec
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


class Builder:
    """Builds into the store of a node, if it has one."""

    def __init__(self, images: ImageResolver, runtime: str, steps: SandboxSteps) -> None:
        """`runtime` is the name of what makes the sandboxes of `steps`."""
        self._images, self._runtime = images, runtime
        self.run_step = steps

    def list(self) -> tuple[ImageInfo, ...] | None:
        """See `Node.list_images`."""
        if not isinstance(self._images, ImageStore):
            return None
        return tuple(
            ImageInfo(
                name=record.name,
                digest=record.digest,
                layers=record.layers,
                created_at=record.created_at,
                size_bytes=record.size_bytes,
            )
            for record in self._images.list()
        )

    async def build(
        self,
        name: str,
        context: Path,
        *,
        dockerfile: Path | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        **options: Any,
    ) -> Image:
        """See `Node.build_image`."""
        from coldframe.images.build import BuildOptions, build

        chosen = BuildOptions(dockerfile, dict(build_args or {}), target)
        return await build(self._store(), name, context, self.run_step, options=chosen, **options)

    async def build_from(
        self, name: str, archive: AsyncIterator[bytes], *, dockerfile: str, **options: Any
    ) -> Image:
        """See `Node.build_image_from`."""
        from coldframe.node import contexts

        async with contexts.unpacked(self._store(), archive) as context:
            for rules in (".dockerignore", f"{dockerfile}.dockerignore"):
                contexts.within(context, rules)
            file = contexts.within(context, dockerfile)
            try:
                return await self.build(name, context, dockerfile=file, **options)
            except ImageError as error:  # where it lies here says nothing to who sent it
                said = str(error).replace(f"{context}/", "").replace(str(context), ".")
                raise type(error)(said) from error

    def _store(self) -> ImageStore:
        if not isinstance(self._images, ImageStore):
            raise CapabilityError(
                f"runtime {self._runtime!r} has no image store to build into; use native"
            )
        return self._images
