"""The life of a node in a process: begun or gone on with, then closed or left to the next."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from coldframe.host import forks
from coldframe.node import unclosed
from coldframe.node.assembly import ImageResolver
from coldframe.node.life import Sandbox
from coldframe.node.sandboxes import CloseReport
from coldframe.node.settings import NodeSettings
from coldframe.node.works import Works, open_works
from coldframe.protocol.errors import ClientClosedError
from coldframe.protocol.ids import new_node_id
from coldframe.runtimes.base import Runtime


class OpenNode:
    """A node that can be started, left and closed; what it is asked for: `Node`."""

    def __init__(
        self,
        settings: NodeSettings | None = None,
        runtime: Runtime | None = None,
        images: ImageResolver | None = None,
        *,
        outlive: bool = False,
        daemon: int | None = None,
    ) -> None:
        """Take a runtime and images, or make those that the settings name.

        With `outlive`, and a runtime that can do it, the sandboxes do not end with this process:
        `start` goes on with what the process before has left, if there is anything; `daemon` is
        what its `leave` returned.
        """
        self._daemon = daemon
        self.settings = settings or NodeSettings.from_environment()
        self.id = new_node_id()
        self._outlive = outlive
        self._given = (runtime, images)
        self._opened: Works | None = None
        self._process = os.getpid()
        forks.own(self)

    # --- start, close -----------------------------------------------------------------

    async def start(self) -> None:
        """Take the lock, reap what dead nodes left, start the runtime.

        Raises:
            CapabilityError: the machine cannot run the runtime, or the home cannot be written.
            VersionMismatchError: what another process has left cannot be gone on with.
        """
        if self._opened is not None:
            return
        works = await open_works(
            self.settings, self._given, self.id, outlive=self._outlive, daemon=self._daemon
        )
        self.id = works.home.node_id
        self.runtime, self.images = works.runtime, works.images
        self._opened = works
        unclosed.opened(self, self.settings.home)

    async def leave(self) -> int | None:
        """Close and end nothing: another process goes on. Twice is fine.

        Where nothing can outlive this process, or there is nothing to be left, everything ends as
        by `close`. Else the lock that says that a process serves the node is returned, still held.
        """
        works = self._shut()
        return None if works is None else await works.leave()

    def _shut(self) -> Works | None:
        """Take no more calls; return what was open."""
        works, self._opened = self._opened, None
        unclosed.closed(self)
        return works

    def abandon(self) -> None:
        """See `forks.Owner`."""
        self._shut()

    async def close(self) -> CloseReport:
        """End every sandbox, whatever fails meanwhile, and say what could not be ended.

        Twice is fine.
        """
        works = self._shut()
        return CloseReport() if works is None else await works.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await (self.leave() if self._outlive else self.close())

    @property
    def _works(self) -> Works:
        """The parts. Raises ClientClosedError unless it is open, and this process's."""
        if self._opened is not None:  # a forked child has abandoned it
            return self._opened
        if self._process != os.getpid():
            raise ClientClosedError(
                f"this node belongs to process {self._process}; a forked process starts one of its "
                "own"
            )
        raise ClientClosedError("the node is closed, or was never started")

    def _find(self, id_or_name: str) -> Sandbox:
        return self._works.register.find(id_or_name)
