"""/v1/presence: clients of this machine that are there, and what ends with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from coldframe.gateway.context import RAW_BODY, enter, service_of
from coldframe.gateway.identity import Scope
from coldframe.gateway.protocol import PEER
from coldframe.gateway.tenants import Tenant
from coldframe.node.presences import Presence
from coldframe.protocol.errors import InvalidRequestError, SandboxNotFoundError
from coldframe.protocol.ids import OPERATION_PATTERN, new_operation_id

router = APIRouter(prefix="/v1/presence", tags=["service"])

PresenceName = Annotated[
    str | None,
    Header(
        alias="Coldframe-Presence",
        pattern=OPERATION_PATTERN,
        description="What the caller calls its presence on this machine.",
    ),
]
_FOR_EVER_S = 10 * 365 * 86400.0
_LONGEST_LINE = 128


def presence_of(request: Request, tenant: Tenant, name: str | None) -> Presence | None:
    """Return who asks, for a request that says with whom something is to end."""
    if name is None:
        return None
    pid = None if tenant.identity.relayed else request.scope.get(PEER)
    return Presence.of(tenant.operation(name), pid)


@router.post("", status_code=204, response_model=None, openapi_extra=RAW_BODY)
async def presence(request: Request, name: PresenceName = None) -> Response:
    """Be there for as long as the body lasts; a node that leaves when idle does not meanwhile.

    Its lines are `+SANDBOX`, what is to end with the caller, and `-SANDBOX`, what is not any more.
    When the connection is lost before the end of the body, the leases of those end at once, and of
    whatever a create with the same `Coldframe-Presence` made or makes. When the service ends they
    are kept for a while, in which the caller comes back under its name and says what it has missed.
    """
    tenant = enter(request, Scope.CREATE)
    caller = presence_of(request, tenant, name or new_operation_id())
    assert caller is not None
    presences = tenant.node.presences()
    with presences.there(caller.name):
        try:
            async with service_of(request).polls.bound(_FOR_EVER_S):
                async for line in _lines(request.stream()):
                    _heed(tenant, caller, line)
        except TimeoutError:
            return Response(status_code=204)  # the service stops, and who asks finds the next one
        except ClientDisconnect:
            presences.lost(caller.name)
            raise
        presences.left(caller.name)
    return Response(status_code=204)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise InvalidRequestError(f"a line has at most {_LONGEST_LINE} bytes")
        for line in lines:
            yield line[: _LONGEST_LINE + 1].decode("ascii", "replace")


def _heed(tenant: Tenant, caller: Presence, line: str) -> None:
    if not line:
        return
    if line[0] not in "+-" or len(line) > _LONGEST_LINE:
        raise InvalidRequestError("a line is +SANDBOX or -SANDBOX")
    with contextlib.suppress(SandboxNotFoundError):  # it has ended
        known = tenant.sandbox(line[1:])
        tenant.node.presences().bind(known, caller if line[0] == "+" else None)
