"""Which node a client uses: what its constructor says, else the environment, else this process's.

The only place in this room that reads the environment.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coldframe.client import _open
from coldframe.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from coldframe.client._http import Address
    from coldframe.client._link import NodeLink, NodeOpener

_PORTS = {"http": 80, "https": 443}


def opener(
    url: str | None,
    api_key: str | None,
    home: str | Path | None,
    runtime: str | None,
    *,
    in_process: bool = False,
) -> NodeOpener:
    """Return what opens the node that was asked for.

    Raises:
        InvalidRequestError: the URL is none, or stands beside what only a node of this process
            takes.
    """
    ours = in_process or not (home is None and runtime is None)
    if url is not None and ours:
        raise InvalidRequestError(
            "home, runtime and in_process ask for a node in this process: not with url"
        )
    if url is None and not ours:
        url = url_of_environment()
    if url is None:
        return _open.in_process(home, runtime)
    return partial(_join, parse(url), api_key or os.environ.get("COLDFRAME_API_KEY") or None)


def url_of_environment() -> str | None:
    """Return what COLDFRAME_URL says."""
    return os.environ.get("COLDFRAME_URL") or None


async def _join(address: Address, api_key: str | None) -> NodeLink:
    from coldframe.client._remote import RemoteNode

    return await RemoteNode.open(address, api_key)


def parse(url: str) -> Address:
    """Read `unix:/PATH`, `http://HOST:PORT` or `https://HOST:PORT`.

    Raises:
        InvalidRequestError: it is none of them.
    """
    from coldframe.client._http import Address

    wrong = InvalidRequestError(
        f"url {url[:200]!r}: write unix:/PATH, http://HOST:PORT or https://HOST:PORT"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return Address("localhost", unix=Path(parts.path))
    plain = parts.path in {"", "/"} and not (parts.query or parts.fragment or parts.username)
    if parts.scheme not in _PORTS or not parts.hostname or not plain:
        raise wrong
    return Address(parts.hostname, port or _PORTS[parts.scheme], tls=parts.scheme == "https")
