"""What both SDKs do, written once for the event loop: clients, execs, streams of output."""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from coldframe.protocol.errors import (
    ClientClosedError,
    ColdframeError,
    InvalidRequestError,
    SandboxStateError,
)
from coldframe.protocol.following import merged
from coldframe.protocol.ids import check_operation_id
from coldframe.protocol.models import (
    Capabilities,
    EventKind,
    ExecRequest,
    ExecResult,
    ImageInfo,
    Ledger,
    OutputChunk,
    SandboxEvent,
    SandboxInfo,
    SandboxSpec,
    SignalScope,
)
from coldframe.protocol.models.sandboxes import refuse_odd_labels

if TYPE_CHECKING:
    from pathlib import Path

    from coldframe.client._link import Changes, NodeLink, NodeOpener
    from coldframe.protocol.network import NetworkPolicy


class ClientCore:
    """One client: its link to a node, and the sandboxes that it made."""

    def __init__(self, opener: NodeOpener) -> None:
        self._opener = opener
        self._link: NodeLink | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._made: dict[str, None] = {}

    async def link(self) -> NodeLink:
        """Return the link, opened on the first use.

        Raises:
            ClientClosedError: the client was closed.
        """
        if self._link is not None and not self._closed:
            return self._link
        async with self._opening:
            if self._closed:
                raise ClientClosedError("this client is closed")
            if self._link is None:
                self._link = await self._opener()
            return self._link

    async def changes(self, operation_id: str | None) -> Changes:
        """Return what makes changes, under an id if there is one.

        Raises:
            ClientClosedError, InvalidRequestError: the client was closed; it is no id.
        """
        link = await self.link()
        return link if operation_id is None else link.under(check_operation_id(operation_id))

    async def close(self) -> None:
        """Delete the sandboxes that this client made, then let the node go.

        Raises:
            SandboxStateError: something could not be ended; the message says what.
        """
        async with self._opening:
            self._closed = True
            link, self._link = self._link, None
        if link is None:
            return
        try:
            # What fails here is tried again, and reported, by the node when it closes.
            deletions = [link.delete(sandbox_id) for sandbox_id in self._made]
            await asyncio.gather(*deletions, return_exceptions=True)
        finally:
            report = await link.close()
        if report.failures:
            raise SandboxStateError("closing left something behind: " + "; ".join(report.failures))

    async def create(self, spec: SandboxSpec, operation_id: str | None) -> SandboxInfo:
        link = await self.link()
        info = await link.create_sandbox(spec, operation_id=operation_id)
        self._made[info.id] = None
        return info

    def keep(self, sandbox_id: str) -> None:
        self._made.pop(sandbox_id, None)
        if self._link is not None:
            self._link.keep(sandbox_id)

    async def get(self, id_or_name: str) -> SandboxInfo:
        return await (await self.link()).get(id_or_name)

    async def list(self, labels: Mapping[str, str] | None) -> tuple[SandboxInfo, ...]:
        try:
            refuse_odd_labels(labels or {})
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return await (await self.link()).list(labels)

    async def delete(self, sandbox_id: str, operation_id: str | None = None) -> SandboxInfo:
        info = await (await self.changes(operation_id)).delete(sandbox_id)
        self._made.pop(info.id, None)
        return info

    async def list_images(self) -> tuple[ImageInfo, ...]:
        return await (await self.link()).list_images() or ()

    async def build_image(
        self,
        name: str,
        context: Path,
        *,
        dockerfile: Path | None,
        build_args: Mapping[str, str] | None,
        target: str | None,
        network: NetworkPolicy,
        deadline_s: float,
        cached: bool,
        operation_id: str | None,
    ) -> str:
        changes = await self.changes(operation_id)
        image = await changes.build_image(
            name,
            context,
            dockerfile=dockerfile,
            build_args=build_args,
            target=target,
            network=network,
            deadline_s=deadline_s,
            cached=cached,
        )
        return image.digest

    async def ledger(self) -> Ledger:
        return await (await self.link()).ledger()

    async def events(
        self, cursor: str | None, kind: EventKind, *, follow: bool
    ) -> AsyncIterator[SandboxEvent]:
        link = await self.link()
        if cursor is None:
            cursor = (await link.events(kind=kind)).next_cursor
        while True:
            page = await link.events(cursor, 1000, follow, kind=kind)
            for event in page.events:
                yield event
            cursor = page.next_cursor
            if not (follow or page.events):
                return

    async def capabilities(self) -> Capabilities:
        return (await self.link()).capabilities()

    async def exec(self, sandbox_id: str, request: ExecRequest) -> ExecResult:
        """Run a command to its end; when the caller is cancelled, so is the command."""
        link = await self.link()
        try:
            return await link.exec(sandbox_id, request)
        except asyncio.CancelledError:
            await kill_quietly(link, sandbox_id, request.operation_id)
            raise

    async def start(self, sandbox_id: str, request: ExecRequest) -> str:
        """Start a command; when the caller is cancelled meanwhile, it does not run on."""
        link = await self.link()
        try:
            return await link.start_exec(sandbox_id, request)
        except asyncio.CancelledError:
            await kill_quietly(link, sandbox_id, request.operation_id)
            raise


async def kill_quietly(link: NodeLink, sandbox_id: str, operation_id: str | None) -> None:
    """Kill a command that nobody waits for any more; that it has ended already is fine."""
    if operation_id is None:
        return
    with contextlib.suppress(ColdframeError):
        # The signal waits for a command that has not had its turn yet.
        await link.signal(operation_id, signals.SIGKILL, SignalScope.TREE)
        # It may have missed a child that was being forked.
        await link.kill_processes(sandbox_id, operation_id)


class Streaming:
    """A foreground command whose output is yielded as it comes; then `result` is set."""

    def __init__(self, core: ClientCore, sandbox_id: str, request: ExecRequest) -> None:
        self._core, self._sandbox_id, self._request = core, sandbox_id, request
        self.operation_id = request.operation_id or ""
        self.result: ExecResult | None = None

    async def run(self) -> AsyncIterator[OutputChunk]:
        """Yield the chunks of both streams; a caller that stops early ends the command."""
        link = await self._core.link()
        try:
            await link.start_exec(self._sandbox_id, self._request)
            async with contextlib.aclosing(merged(link, self.operation_id)) as chunks:
                async for chunk in chunks:
                    yield chunk
            self.result = await link.wait_exec(self.operation_id)
        finally:
            if self.result is None:
                await kill_quietly(link, self._sandbox_id, self.operation_id)
