"""Tell the machine's node that this client is there, and what is to end with it.

One request whose body does not end: its connection lasts as long as the process, whatever the
event loop is busy with. When it is lost, the node ends the leases of what was named in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import TYPE_CHECKING

from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.ids import new_operation_id

if TYPE_CHECKING:
    from coldframe.client._http import Http

_PAUSE_S = 1.0
"""Between one try and the next: a node that is stopping answers at once."""
_GOODBYE_S = 5.0
_HEADER = "Coldframe-Presence"


class Presence:
    """From its making to its close. All but `keep` belongs to the loop that it was made on."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._name = new_operation_id()
        self._begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._mine: dict[str, None] = {}
        self._kept: dict[str, None] = {}
        """What is to stay: a node that did not hear of it would end it with us."""
        self._words: asyncio.Queue[bytes | None] | None = None
        self._closing = self._said_goodbye = False
        self._task = asyncio.ensure_future(self._last())

    async def header(self) -> tuple[str, str]:
        """Return what a create says so that its sandbox ends with this client, heard of or not.

        Waits until the node has been told that there is such a client, though not for long.
        """
        if not self._begun.is_set():
            await asyncio.wait({asyncio.ensure_future(self._begun.wait())}, timeout=_PAUSE_S)
        return (_HEADER, self._name)

    def made(self, sandbox_id: str) -> None:
        """A sandbox is to end with this client."""
        self._mine[sandbox_id] = None
        self._say(f"+{sandbox_id}\n".encode("ascii"))

    def ended(self, sandbox_id: str) -> None:
        """A sandbox has ended."""
        self._mine.pop(sandbox_id, None)
        self._kept.pop(sandbox_id, None)

    def keep(self, sandbox_id: str) -> None:
        """A sandbox is to stay. From any thread."""
        self._loop.call_soon_threadsafe(self._stays, sandbox_id)

    def _stays(self, sandbox_id: str) -> None:
        if sandbox_id in self._mine:
            del self._mine[sandbox_id]
            self._kept[sandbox_id] = None
            self._say(f"-{sandbox_id}\n".encode("ascii"))

    async def close(self) -> None:
        """Say goodbye: what was named and lives is kept no longer, and nobody was lost."""
        await asyncio.sleep(0)  # what other threads have said comes first
        self._closing = True
        self._say(None)
        heard = self._words is not None or self._kept
        await asyncio.wait({self._task}, timeout=_GOODBYE_S if heard else 0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _say(self, word: bytes | None) -> None:
        if self._words is not None:  # else the next connection begins with all there is to say
            self._words.put_nowait(word)

    async def _last(self) -> None:
        while not self._over:
            earliest = monotonic() + _PAUSE_S
            with contextlib.suppress(ColdframeError):
                said = self._http.stream(
                    "POST", "/v1/presence", self._said(), [(_HEADER, self._name)]
                )
                async with said as (_, pieces):
                    async for _ in pieces:
                        pass
                    self._said_goodbye = self._closing
            self._words = None
            await asyncio.sleep(0 if self._over else max(0.0, earliest - monotonic()))

    @property
    def _over(self) -> bool:
        return self._closing and (self._said_goodbye or not self._kept)

    async def _said(self) -> AsyncIterator[bytes]:
        words = self._words = asyncio.Queue()
        self._begun.set()  # the head of the request has been written
        said = [f"+{sandbox_id}\n" for sandbox_id in self._mine]
        said += [f"-{sandbox_id}\n" for sandbox_id in self._kept]
        yield "".join(said).encode("ascii") or b"\n"
        if self._closing:
            return
        while (word := await words.get()) is not None:
            yield word
