"""/v1/presence: clients of this machine that are there, and what ends with them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from coldframe.gateway.clients import PresenceName
from coldframe.gateway.context import RAW_BODY, enter, service_of
from coldframe.gateway.identity import Scope
from coldframe.protocol.errors import InvalidRequestError

router = APIRouter(prefix="/v1/presence", tags=["service"])

_FOR_EVER_S = 10 * 365 * 86400.0
_LONGEST_LINE = 128
_MOST = 100_000


@router.post("", status_code=204, response_model=None, openapi_extra=RAW_BODY)
async def presence(request: Request, name: PresenceName = None) -> Response:
    """Be there for as long as the body lasts; a node that leaves when idle does not meanwhile.

    Its lines are `+SANDBOX`, what is to end with the caller, and `-SANDBOX`, what is not any more.
    When the connection is lost before the end of the body, the leases of those end at once, and of
    whatever a create with the same `Coldframe-Presence` made or makes.
    """
    tenant = enter(request, Scope.CREATE)
    service = service_of(request)
    with service.clients.there(tenant, name) as client:
        try:
            async with service.polls.bound(_FOR_EVER_S):
                async for line in _lines(request.stream()):
                    _heed(client.sandboxes, line)
        except TimeoutError:
            pass  # the service stops, and who asks finds the next one
        except ClientDisconnect:
            await client.lost(tenant)
            raise
    return Response(status_code=204)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise InvalidRequestError(f"a line has at most {_LONGEST_LINE} bytes")
        for line in lines:
            yield line[: _LONGEST_LINE + 1].decode("ascii", "replace")


def _heed(mine: dict[str, None], line: str) -> None:
    if not line:
        return
    if line[0] not in "+-" or len(line) > _LONGEST_LINE:
        raise InvalidRequestError("a line is +SANDBOX or -SANDBOX")
    if line[0] == "-":
        mine.pop(line[1:], None)
        return
    if len(mine) >= _MOST:
        raise InvalidRequestError(f"at most {_MOST} sandboxes can end with one caller")
    mine[line[1:]] = None
