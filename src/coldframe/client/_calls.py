"""One request to a service: sent again where that is safe, and its error raised as what it was."""

from __future__ import annotations

import asyncio

from coldframe.client._http import Answer, Headers, Http
from coldframe.protocol import wire
from coldframe.protocol.errors import Execution, ServiceUnreachableError

_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Before each further try to reach a service."""
_RESTART_PAUSES_S = (2.0,) * 14
"""Before still further ones, if it has been reached before: it may be being restarted."""


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
    pauses = (*_PAUSES_S, *(_RESTART_PAUSES_S if known else ()))
    for tried, pause_s in enumerate((*pauses, None)):
        try:
            answer = await http.request(method, target, body, headers, within_s=within_s)
        except ServiceUnreachableError as error:
            sent = error.execution is not Execution.NOT_EXECUTED
            given_up = tried >= len(_PAUSES_S) and not _may_come_back(error)
            if pause_s is None or given_up or (sent and not replay):
                raise
            await asyncio.sleep(pause_s)
            continue
        if answer.status >= 400:
            raise wire.read_error(answer.body, answer.status)
        return answer
    raise AssertionError("the last try returns or raises")


def _may_come_back(error: ServiceUnreachableError) -> bool:
    """Whether it may have been killed: who stops for good takes its unix socket away."""
    return isinstance(error.__cause__, ConnectionRefusedError)
