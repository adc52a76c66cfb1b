"""Which node a client uses: what its constructor says, else the environment, else the machine's.

The only place in this room that reads the environment.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coldframe.client import _open
from coldframe.protocol import places
from coldframe.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from coldframe.client._connection import Address
    from coldframe.client._link import NodeLink, NodeOpener

IN_PROCESS = "in-process"
"""What a URL says that names no service, but a node in this process."""
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
        InvalidRequestError: the URL is none, or stands beside what only a node of this machine
            takes.
    """
    local = not (home is None and runtime is None)
    if url is not None and url != IN_PROCESS and (in_process or local):
        raise InvalidRequestError(
            "home, runtime and in_process ask for a node of this machine: not with url"
        )
    said = url_of_environment() if url is None else url
    if in_process or said == IN_PROCESS:
        return _open.in_process(home, runtime)
    if said is None or local:
        return partial(_join, _home(home), runtime)
    return partial(_reach, parse(said), api_key or os.environ.get("COLDFRAME_API_KEY") or None)


def url_of_environment() -> str | None:
    """Return what COLDFRAME_URL says."""
    return os.environ.get("COLDFRAME_URL") or None


def _home(given: str | Path | None) -> Path:
    """Return what was given, else what COLDFRAME_HOME says, else the default."""
    return Path(given or os.environ.get("COLDFRAME_HOME") or places.DEFAULT_HOME).absolute()


async def _join(home: Path, runtime: str | None) -> NodeLink:
    from coldframe.client._machine import Machine

    wanted = runtime or os.environ.get("COLDFRAME_RUNTIME") or None
    return await Machine(home, wanted, os.environ).join()


async def _reach(address: Address, api_key: str | None) -> NodeLink:
    from coldframe.client._remote import RemoteNode

    return await RemoteNode.open(address, api_key)


def parse(url: str) -> Address:
    """Read `unix:/PATH`, `http://HOST:PORT` or `https://HOST:PORT`.

    Raises:
        InvalidRequestError: it is none of them.
    """
    from coldframe.client._connection import Address

    wrong = InvalidRequestError(
        f"url {url[:200]!r}: write unix:/PATH, http://HOST:PORT, https://HOST:PORT or in-process"
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
