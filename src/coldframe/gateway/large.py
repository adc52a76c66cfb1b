"""Answers that are large: each owner has only so much of them in the service's memory at once.

A result may carry 128 MiB of output, and any number of requests may ask for it and read slowly.
"""

from __future__ import annotations

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coldframe.gateway.context import Service, json_answer
from coldframe.gateway.tenants import Tenant
from coldframe.node.shares import Shares
from coldframe.protocol import wire
from coldframe.protocol.models import MIB, ExecResult

_GROWTH = 3
"""A window, and what it is in base64, with room for the copy that is being made of it."""
_PIECE = 1 << 18
_SMALL = 2 * MIB
"""Smaller ones do not count."""


def result_answer(
    service: Service, tenant: Tenant, result: ExecResult, shown: BaseModel
) -> Response:
    """Answer with what shows a result.

    Raises:
        CapacityError: the owner has too many large ones on their way already.
    """
    owner, size = tenant.identity.owner, _size(result)
    if owner is None or size <= _SMALL:
        return json_answer(shown)
    amount = _GROWTH * size
    service.answers.take(owner, amount)
    try:
        return _Held(wire.dump(shown), service.answers, owner, amount)
    except BaseException:
        service.answers.give_back(owner, amount)
        raise


def _size(result: ExecResult) -> int:
    return sum(len(one.head) + len(one.tail) for one in (result.out, result.err))


class _Held(Response):
    """Counts until all of it has been taken; sent in pieces, for a reader that is slow."""

    def __init__(self, body: bytes, shares: Shares, owner: str, amount: int) -> None:
        super().__init__(body, media_type="application/json")
        self._shares, self._owner, self._amount = shares, owner, amount

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            whole = memoryview(self.body)
            for at in range(0, len(whole), _PIECE):
                piece = bytes(whole[at : at + _PIECE])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._shares.give_back(self._owner, self._amount)
