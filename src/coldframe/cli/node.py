"""`coldframe node`: the machine's node as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from coldframe.cli import flags
from coldframe.cli.groups import group
from coldframe.protocol import places
from coldframe.protocol.errors import (
    CapabilityError,
    InvalidRequestError,
    NotPermittedError,
)

app = group()

_UPGRADE_S = 120.0
_STOP_S = 120.0
"""How long a node may take to end by itself: commands have 30 s of it, the rest is deletion."""


@app.command()
def status(
    as_json: flags.Json = False,
) -> int:
    """Say whether the machine's node runs, and how much it does.

    It is the node of COLDFRAME_HOME (default /var/lib/coldframe). Exit code: 0 it answers, 1 it
    does not run.
    """
    home = _home()
    from coldframe.host import orphans

    pid = pid_of_node(home)
    waiting = orphans.left(home)
    found: dict[str, Any] = {
        "running": pid is not None,
        "home": str(home),
        "socket": str(places.socket_of(home)),
        "pid": pid,
        "left": list(waiting),
    }
    if pid is not None:
        found |= asyncio.run(_asked(home))
    if as_json:
        print(json.dumps(found, indent=2))
    elif pid is None:
        left = f"; what it left goes on: {', '.join(waiting)}" if waiting else ""
        print(f"no node runs for {home}{left}; a client starts one, and so does coldframe serve")
    else:
        states = ", ".join(f"{count} {state}" for state, count in found["sandboxes"].items())
        print(f"the node of {home} runs: process {pid}, {found['socket']}")
        print(f"coldframe {found['coldframe']}, protocol {found['protocol']}, {found['runtime']}")
        print(f"sandboxes: {states or 'none'}")
    return 0 if pid is not None else 1


@app.command()
def stop(
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for commands; they end with the node.")
    ] = False,
    as_json: flags.Json = False,
) -> None:
    """Stop the machine's node, and return when it has ended. One that does not run is fine.

    Commands that run have 30 s to come to their end; then every sandbox is deleted. Clients that
    are there get an error, and do not start it again; new ones do.
    """
    home = _home()
    pid = pid_of_node(home)
    if pid is None:
        from coldframe.host import orphans

        ended = orphans.end_left(home) if orphans.left(home) else ()
        _say_stopped(home, None, bool(ended), as_json=as_json)
        return
    with _process(pid) as process:
        _signal(process, signal.SIGQUIT if now else signal.SIGTERM)
        if not select.select([process], [], [], _STOP_S)[0]:
            raise CapabilityError(
                f"the node (process {pid}) has not ended within {_STOP_S:g} s; see what it waits "
                "for with coldframe sandbox ls, or use --now"
            )
    _say_stopped(home, pid, True, as_json=as_json)


def _say_stopped(home: Path, pid: int | None, ended: bool, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"home": str(home), "pid": pid, "ended": ended}, indent=2))
    else:
        print(f"the node of {home} has ended" if ended else f"no node runs for {home}")


@app.command()
def upgrade(as_json: flags.Json = False) -> None:
    """Let the machine's node go on as the Coldframe that is installed now.

    Sandboxes and commands are not touched, clients wait for a moment. Returns once the new one
    serves. Refused, and nothing is changed, where the new one could not go on with them.
    """
    from coldframe.gateway.handover import require_program

    home = _home()
    pid = pid_of_node(home)
    if pid is None:
        raise InvalidRequestError(f"no node runs for {home}; start it with coldframe serve")
    require_program(asyncio.run(_asked(home))["spawner_protocol"])
    before = _starts(home)
    with _process(pid) as process:
        _signal(process, signal.SIGHUP)
        until = time.monotonic() + _UPGRADE_S
        while _starts(home) == before:
            if select.select([process], [], [], 0.05)[0]:
                raise CapabilityError(
                    f"the node (process {pid}) has ended; its sandboxes go on: coldframe serve"
                )
            if time.monotonic() > until:
                raise CapabilityError(
                    f"the node (process {pid}) was not replaced within {_UPGRADE_S:g} s; its log "
                    "says why"
                )
    told = asyncio.run(_asked(home))
    if as_json:
        print(json.dumps({"home": str(home), **told}, indent=2))
    else:
        print(f"the node of {home} is coldframe {told['coldframe']} now")


def _starts(home: Path) -> dict[str, int]:
    """How often each node that is being served was begun to be."""
    from coldframe.host import gc
    from coldframe.node.home import starts_of

    found: dict[str, int] = {}
    for node_id in gc.node_ids(home):
        directory = home / "nodes" / node_id
        with contextlib.suppress(OSError):  # it went meanwhile
            if gc.is_held(directory / gc.DAEMON):
                found[node_id] = starts_of(directory)
    return found


def _home() -> Path:
    """Return the home whose node is meant.

    Raises:
        InvalidRequestError: COLDFRAME_URL names another service than the node of this home.
    """
    from coldframe.client._address import IN_PROCESS, parse, url_of_environment
    from coldframe.node.settings import NodeSettings

    home = NodeSettings.from_environment().home
    url = url_of_environment()
    if url is not None and url != IN_PROCESS and not _is_of(home, parse(url).unix):
        raise InvalidRequestError(
            f"COLDFRAME_URL={url} is not the node of {home}: unset it to mean that one; another "
            "node of this machine is named by COLDFRAME_HOME"
        )
    return home


def _is_of(home: Path, path: Path | None) -> bool:
    """Whether the node of a home is who serves, or would serve, a socket."""
    own = places.socket_of(home)
    if path is None or path == own:
        return path is not None
    pid = pid_at(path)
    return pid is not None and pid == pid_at(own)


def pid_of_node(home: Path) -> int | None:
    """Return the process that serves the home's socket; None: nobody does. Raises as `pid_at`."""
    return pid_at(places.socket_of(home))


def pid_at(path: Path) -> int | None:
    """Return the process that serves a unix socket; None: nobody does.

    Raises:
        NotPermittedError: it is another user's.
        CapabilityError: it is in a container that has processes of its own.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as link:
        link.settimeout(10)
        try:
            with places.address_of(path) as address:
                link.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise NotPermittedError(
                f"the node at {path} is for root and the user who started it; run this as one of "
                "them"
            ) from error
        except OSError as error:
            raise InvalidRequestError(f"{path}: {error}") from error
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = int.from_bytes(credentials[:4], "little")
    if pid == 0:
        raise CapabilityError(f"the node at {path} runs in another container; stop it there")
    return pid


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int]:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InvalidRequestError(f"the node (process {pid}) has just ended") from None
    try:
        yield process
    finally:
        os.close(process)


def _signal(process: int, number: signal.Signals = signal.SIGTERM) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


async def _asked(home: Path) -> dict[str, Any]:
    """Ask a node of any version: no protocol is claimed, and only JSON is read."""
    from coldframe.client._calls import call
    from coldframe.client._connection import Address
    from coldframe.client._http import Http

    http = Http(Address("localhost", unix=places.socket_of(home)), [])
    with contextlib.closing(http):

        async def get(target: str) -> Any:
            return json.loads((await call(http, "GET", target)).body)

        versions, able = await get("/v1/versions"), await get("/v1/capabilities")
        states: Counter[str] = Counter()
        cursor = ""
        while True:
            page = await get(f"/v1/sandboxes?limit=1000{cursor}")
            states.update(one["state"] for one in page["sandboxes"])
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={quote(page['next_cursor'], safe='')}"
    return {
        "coldframe": versions["coldframe"],
        "protocol": versions["protocol"],
        "runtime": able["runtime"],
        "spawner_protocol": able["details"].get("spawner_protocol"),
        "sandboxes": dict(states),
    }
