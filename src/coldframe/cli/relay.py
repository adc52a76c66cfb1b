"""`coldframe serve --node URL`: a gateway before a node that another process serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldframe.gateway.relay import ServedRelay
    from coldframe.gateway.tenants import Quotas


@asynccontextmanager
async def relayed(url: str, key: str | None, quotas: Quotas) -> AsyncIterator[ServedRelay]:
    """Reach a node's service and make sure that it lets this gateway speak for others.

    Raises:
        InvalidRequestError: the URL is none.
        ServiceUnreachableError, VersionMismatchError: it cannot be used.
        NotAuthenticatedError, NotPermittedError: the key is no administrator's.
    """
    from coldframe.client._address import parse
    from coldframe.client._calls import call
    from coldframe.client._http import Http
    from coldframe.gateway import behalf
    from coldframe.gateway.identity import local
    from coldframe.gateway.relay import ServedRelay
    from coldframe.protocol.wire import SPOKEN_VERSIONS, VERSION_HEADER

    own = [] if key is None else [("Authorization", f"Bearer {key}")]
    http = Http(parse(url), own)
    try:
        asking = [
            (VERSION_HEADER, ", ".join(map(str, SPOKEN_VERSIONS))),
            (behalf.HEADER.decode(), behalf.told(local("gateway"), None)),
        ]
        await call(http, "GET", "/v1/capabilities", headers=asking)
        yield ServedRelay(http, quotas, own)
    finally:
        http.close()
