"""One request to a service: sent again where that is safe, and its error raised as what it was."""

from __future__ import annotations

import asyncio

from coldframe.client._http import Answer, Headers, Http
from coldframe.protocol import wire
from coldframe.protocol.errors import Execution, ServiceUnreachableError

_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Before each further try to reach a service."""


async def call(
    http: Http,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Headers = (),
    *,
    replay: bool = True,
    within_s: float | None = None,
) -> Answer:
    """Return a good answer, or raise the error that it stands for.

    With `replay` the request may be sent again when its connection was lost; without it only if
    it was never sent.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            answer = await http.request(method, target, body, headers, within_s=within_s)
        except ServiceUnreachableError as error:
            sent = error.execution is not Execution.NOT_EXECUTED
            if pause_s is None or (sent and not replay):
                raise
            await asyncio.sleep(pause_s)
            continue
        if answer.status >= 400:
            raise wire.read_error(answer.body, answer.status)
        return answer
    raise AssertionError("the last try returns or raises")
