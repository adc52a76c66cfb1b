"""One request to a service: sent again where that is safe, and its error raised as what it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from coldframe.client._connection import Answer
from coldframe.client._content import Pieces
from coldframe.client._http import Headers, Http
from coldframe.protocol import wire
from coldframe.protocol.errors import Execution, ServiceUnreachableError
from coldframe.protocol.ids import new_operation_id

_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Before each further try to reach a service."""
_RESTART_S = 32.0
"""How long a service that has been reached before may be away, since it may be being restarted.
Counted from when it was first missed: what is asked later waits no longer than that either."""


async def call(
    http: Http,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Headers = (),
    *,
    replay: bool = True,
    within_s: float | None = None,
    known: bool = False,
) -> Answer:
    """Return a good answer, or raise the error that it stands for.

    With `replay` the request may be sent again when its connection was lost; without it only if
    it was never sent. `known`: the service has answered before.
    """
    tries = Tries(http, known=known)
    while True:
        try:
            answer = await http.request(method, target, body, headers, within_s=within_s)
        except ServiceUnreachableError as error:
            await tries.pause(error, again=replay)
            continue
        if answer.status >= 400:
            raise wire.read_error(answer.body, answer.status)
        return answer


class Tries:
    """How often, and after how long, a request is sent again that had no answer."""

    def __init__(self, http: Http, *, known: bool) -> None:
        self._http, self._known = http, known
        self._failed = self._lost = 0

    async def pause(self, error: ServiceUnreachableError, *, again: bool) -> None:
        """Wait before the next try; raise the error of this one if it was the last.

        `again`: whether what may have been done may be asked for again.
        """
        if _may_come_back(error):
            away = self._known and self._http.refused_s < _RESTART_S
            given_up = not away and self._failed >= len(_PAUSES_S)
        else:
            # Apart: who has waited for a restart may yet meet the next one.
            self._lost += 1
            given_up = self._lost > len(_PAUSES_S)
        sent = error.execution is not Execution.NOT_EXECUTED
        if given_up or (sent and not again):
            raise error
        await asyncio.sleep(_PAUSES_S[min(self._failed, len(_PAUSES_S) - 1)])
        self._failed += 1


async def sent(
    http: Http,
    method: str,
    target: str,
    whole: AsyncIterator[bytes],
    headers: Headers,
    *,
    content: AsyncIterator[bytes],
) -> bytes:
    """Send content as it is read, and return the body of the answer; raise as `call`.

    `whole` is what is sent first; after a lost connection it is `content`, from its begin, if that
    can be read again; then the headers must say an id, so that it is taken once.
    """
    tries = Tries(http, known=True)
    while True:
        try:
            async with http.stream(method, target, whole, headers) as (head, pieces):
                body = b"".join([piece async for piece in pieces])
        except ServiceUnreachableError as error:
            if not (isinstance(content, Pieces) and content.repeats and await content.rewind()):
                raise
            await tries.pause(error, again=True)
            whole = content
            continue
        if head.status >= 400:
            raise wire.read_error(body, head.status)
        return body


def once(operation_id: str | None = None) -> Headers:
    """Return the headers of a change that may be sent again: it is made once for the id."""
    return (("Idempotency-Key", operation_id or new_operation_id()),)


def _may_come_back(error: ServiceUnreachableError) -> bool:
    """Whether it may have been killed: who stops for good takes its unix socket away."""
    return isinstance(error.__cause__, ConnectionRefusedError)
