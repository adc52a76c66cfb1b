"""`coldframe events`: what becomes of sandboxes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from coldframe.cli import render
from coldframe.cli.clients import with_client

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient
    from coldframe.protocol.models import SandboxEvent

OLDEST = "oldest"


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as they come, until interrupted.")
    ] = False,
    since: Annotated[
        str,
        typer.Option(
            metavar="CURSOR",
            help="Only what came after it: the last word of a line. Default: the oldest kept.",
        ),
    ] = OLDEST,
    sandbox: Annotated[
        str | None, typer.Option(metavar="SANDBOX", help="Of this sandbox alone: id or name.")
    ] = None,
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="state (transitions), egress, tamper or storage.")
    ] = "state",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Print what happens to sandboxes, of the machine's node or what COLDFRAME_URL names.

    A line has time, sandbox, what happened (of transitions state, version, reason), and the cursor
    to go on from with --since. A node keeps 16,384 of each kind.
    """

    async def tell(client: AsyncSandboxClient) -> None:
        wanted = None if sandbox is None else (await client.get_sandbox(sandbox)).id
        async for event in client.events(since, follow=follow, kind=kind):
            if wanted is None or event.sandbox_id == wanted:
                _print(event, as_json=as_json)

    with_client(tell)


def _print(event: SandboxEvent, *, as_json: bool) -> None:
    if as_json:
        print(event.model_dump_json(), flush=True)
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    line = f"{at}  {event.sandbox_id}  {_what(event)}  {event.cursor}"
    print(render.safe(line), flush=True)


def _what(event: SandboxEvent) -> str:
    if (asked := event.egress) is not None:
        where = asked.name or asked.address or ""
        port = "" if asked.port is None else f":{asked.port}"
        why = f"  {asked.reason}" if asked.reason else ""
        return f"{asked.kind} {asked.decision}  {where}{port}{why}"
    if (refused := event.tamper) is not None:
        return f"refused to write {refused.name}  {refused.program}  {refused.cause}"
    if (disk := event.storage) is not None:
        return "can write again" if disk.writable else f"cannot write  {disk.reason}"
    reason = f"  {event.reason}" if event.reason else ""
    return f"{event.state}  v{event.version}{reason}"
