"""How the connections of a service that stops come to their end: by themselves, or cut.

Whoever still takes what it asked for is let finish, within bounds. Whoever takes nothing must hold
up neither the others nor the next process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, cast

from coldframe.gateway.joined import Joined
from coldframe.gateway.lasting import Lasting
from coldframe.gateway.protocol import Bounded

log = logging.getLogger("coldframe.gateway")

Conversation = Bounded | Lasting
"""What uvicorn has for a connection of ours."""

_LOOK_S = 0.05
_UNREAD_S = 5.0
"""For how long a client may take nothing of its answer."""


async def part(
    connections: Callable[[], list[Conversation]], latest: float, hurried: Callable[[], bool]
) -> None:
    """Return once every connection has ended; cut those whose client takes nothing.

    At `latest` (the loop's time), or once hurried, the others are cut, too.
    """
    now = asyncio.get_running_loop().time
    cut: set[Conversation] = set()
    unread: dict[Conversation, _Unread] = {}
    while (left := set(connections()) - cut) and now() < latest and not hurried():
        unread = {one: _look(one, unread.get(one), now()) for one in left if _owed(one)}
        asleep = {one for one, what in unread.items() if now() - what.since >= _UNREAD_S}
        _cut(asleep, f"nothing was read of their answers for {_UNREAD_S:g} s")
        cut |= asleep
        await asyncio.sleep(_LOOK_S)
    _cut(left, "the service ends before their answers do")


class _Unread(NamedTuple):
    """What a client had taken when it took something the last time."""

    taken: int
    since: float


def _look(one: Conversation, before: _Unread | None, now: float) -> _Unread:
    taken = cast(Joined, one.transport).written - _owed(one)
    return before if before is not None and before.taken == taken else _Unread(taken, now)


def _owed(one: Conversation) -> int:
    return cast(Joined, one.transport).owed()


def _cut(those: set[Conversation], why: str) -> None:
    cut_short = sum(one.is_answering() or _owed(one) > 0 for one in those)
    for one in those:
        one.transport.abort()
    if cut_short:
        log.warning("%d connections cut: %s", cut_short, why)
