"""Revoking a key ends what is open with it: streams, WebSockets, requests that wait.

A request is let in once; what lasts is looked at again every second, by key and not by request, so
that a thousand idle connections of one key cost one look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coldframe.gateway.store import Store
from coldframe.protocol.errors import StoreUnreachableError

log = logging.getLogger("coldframe.gateway")

LOOK_S = 1.0


class Cut:
    """One request that is open."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self.made = False

    def make(self) -> None:
        """End it."""
        self.made = True
        self._end()


class Watch:
    """The requests that are open, by key."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[str, set[Cut]] = {}
        self._looks: set[asyncio.Task[None]] = set()

    @contextmanager
    def over(self, key_id: str) -> Iterator[Cut]:
        """Cancel the current task in a block, `made` being set, once a key is revoked."""
        task = asyncio.current_task()
        assert task is not None
        cut = self.begin(key_id, task.cancel)
        try:
            yield cut
        finally:
            self.end(key_id, cut)

    def begin(self, key_id: str, end: Callable[[], object]) -> Cut:
        """Call `end` once a key is revoked, up to `Watch.end`."""
        cuts = self._open.get(key_id)
        if cuts is None:
            cuts = self._open[key_id] = set()
            self._look_later(key_id)
        cut = Cut(end)
        cuts.add(cut)
        return cut

    def end(self, key_id: str, cut: Cut) -> None:
        """A request has been answered."""
        self._open[key_id].discard(cut)

    def _look_later(self, key_id: str) -> None:
        asyncio.get_running_loop().call_later(LOOK_S, self._begin_look, key_id)

    def _begin_look(self, key_id: str) -> None:
        if not self._open[key_id]:
            del self._open[key_id]
            return
        look = asyncio.ensure_future(self._look(key_id))
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look(self, key_id: str) -> None:
        try:
            record = await self._store.find_key(key_id)
        except StoreUnreachableError:
            pass  # what runs goes on
        else:
            if record is None or record.revoked_at is not None:
                cuts = list(self._open[key_id])
                if cuts:
                    log.warning("key %s was revoked: %d open requests end", key_id, len(cuts))
                for cut in cuts:
                    cut.make()
        finally:
            self._look_later(key_id)
