"""One request to a service: sent again where that is safe, and its error raised as what it was."""

from __future__ import annotations

import asyncio
import itertools

from coldframe.client._connection import Answer
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
    lost = 0
    for failed in itertools.count():
        try:
            answer = await http.request(method, target, body, headers, within_s=within_s)
        except ServiceUnreachableError as error:
            sent = error.execution is not Execution.NOT_EXECUTED
            if _may_come_back(error):
                away = known and http.refused_s < _RESTART_S
                given_up = not away and failed >= len(_PAUSES_S)
            else:
                # Apart: who has waited for a restart may yet meet the next one.
                lost += 1
                given_up = lost > len(_PAUSES_S)
            if given_up or (sent and not replay):
                raise
            await asyncio.sleep(_PAUSES_S[min(failed, len(_PAUSES_S) - 1)])
            continue
        if answer.status >= 400:
            raise wire.read_error(answer.body, answer.status)
        return answer
    raise AssertionError("the last try returns or raises")


def once() -> Headers:
    """Return the headers of a change that may be sent again: it is made once."""
    return (("Idempotency-Key", new_operation_id()),)


def _may_come_back(error: ServiceUnreachableError) -> bool:
    """Whether it may have been killed: who stops for good takes its unix socket away."""
    return isinstance(error.__cause__, ConnectionRefusedError)
