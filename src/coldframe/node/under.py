"""Changes of a node that are made once under an id, for callers in its own process.

By HTTP the same is done with whole requests and answers (`gateway.once`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from coldframe.node.effects import Effects, Returned, lost
from coldframe.node.operations import may_run_again, mismatch
from coldframe.protocol import wire
from coldframe.protocol.errors import ColdframeError

if TYPE_CHECKING:
    from coldframe.node.node import Node
    from coldframe.runtimes.base import FileAccess

Change = Callable[..., Awaitable[Any]]


class Under:
    """Has those of a node's methods that change something; see `Node.under`."""

    def __init__(self, node: Node, effects: Effects, operation_id: str) -> None:
        self._node, self._effects, self._id = node, effects, operation_id

    def __getattr__(self, name: str) -> Change:
        return partial(self._once, name, getattr(self._node, name))

    def files(self, id_or_name: str) -> FileAccess:
        """See `Node.files`."""
        return cast("FileAccess", _Files(self._once, self._node, id_or_name))

    async def _once(self, name: str, change: Change, *args: Any, **kwargs: Any) -> Any:
        contents = [_Content(one) for one in args if isinstance(one, AsyncIterator)]
        words = [
            name,
            *map(_word, args),
            *(f"{key}={_word(kwargs[key])}" for key in sorted(kwargs)),
        ]
        asked = hashlib.sha256("\0".join(words).encode()).hexdigest()
        waiting = iter(contents)
        given = [next(waiting) if isinstance(one, AsyncIterator) else one for one in args]
        act = partial(_act, partial(change, *given, **kwargs), contents)
        told = await self._effects.once(self._id, asked, None, act, Returned(error=lost()))
        first = told.body_sha256
        for content in contents:
            if not content.begun and first is not None and first != await content.rest():
                raise mismatch(self._id)
        if told.error is not None:
            raise told.error
        return told.value


class _Files:
    """The files of a sandbox; each change of them under the id."""

    def __init__(self, once: Change, node: Node, id_or_name: str) -> None:
        self._once, self._node, self._of = once, node, id_or_name

    def __getattr__(self, name: str) -> Change:
        async def change(*args: Any, **kwargs: Any) -> Any:
            return await getattr(self._node.files(self._of), name)(*args, **kwargs)

        return partial(self._once, f"{self._of} {name}", change)


async def _act(change: Callable[[], Awaitable[Any]], contents: list[_Content]) -> Returned:
    try:
        value, error, final = await change(), None, True
    except ColdframeError as failed:
        value, error, final = None, failed, not may_run_again(failed)
    digest = contents[0].sha256 if contents else None
    return Returned(value, error, digest, final)


class _Content(AsyncIterator[bytes]):
    """Content, of which the digest is taken as it is read."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source, self._digest = source, hashlib.sha256()
        self.begun = False
        self.sha256: str | None = None
        """Of all of it, once it has been read."""

    async def __anext__(self) -> bytes:
        self.begun = True
        try:
            piece = await anext(self._source)
        except StopAsyncIteration:
            self.sha256 = self._digest.hexdigest()
            raise
        self._digest.update(piece)
        return piece

    async def rest(self) -> str | None:
        """Read all of it; return its digest."""
        async for _ in self:
            pass
        return self.sha256


def _word(value: Any) -> str:
    """Return what tells a value from another."""
    if isinstance(value, AsyncIterator):
        return "content"
    if isinstance(value, BaseModel):
        return wire.dump(value, secrets=True).hex()
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    return repr(value)
