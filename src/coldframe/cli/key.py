"""`coldframe key`: keys and quotas of this machine's service."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coldframe.cli import render
from coldframe.cli.serve import STORE_OPTION
from coldframe.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from coldframe.gateway.store import Store

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

T = TypeVar("T")

_Store = Annotated[str | None, STORE_OPTION]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout.")]


@app.command()
def create(
    owner: Annotated[str, typer.Option(help="Whose sandboxes it makes and sees.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help="read, exec, create or admin; repeatable. Default: the first three."),
    ] = None,
    store: _Store = None,
) -> None:
    """Make a key and print it. It cannot be shown again: the store has only its digest.

    From then on TCP asks for keys, also in a service that runs already.
    """
    from coldframe.gateway.identity import Scope
    from coldframe.gateway.keys import create_key

    try:
        scopes = [Scope(word) for word in scope or ("read", "exec", "create")]
    except ValueError as error:
        raise InvalidRequestError(f"--scope: {error}; read, exec, create or admin") from error
    print(_in_store(store, lambda opened: create_key(opened, owner, scopes)))


@app.command("ls")
def ls(as_json: _Json = False, store: _Store = None) -> None:
    """List keys, revoked ones too."""
    records = _in_store(store, lambda opened: opened.keys())
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "id": one.id,
                        "owner": one.owner,
                        "scopes": one.scopes,
                        "created_at": one.created_at,
                        "revoked_at": one.revoked_at,
                    }
                    for one in records
                ],
                indent=2,
            )
        )
        return
    for one in records:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.created_at))
        state = "revoked" if one.revoked_at is not None else "valid"
        print(f"{one.id}  {one.owner}  {','.join(one.scopes)}  {made}  {state}")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="Its id, or the key itself.")],
    store: _Store = None,
) -> None:
    """Refuse a key from the next request on."""
    from coldframe.gateway.keys import revoke_key

    revoked = _in_store(store, lambda opened: revoke_key(opened, key))
    print(f"revoked {revoked}")


@app.command()
def quota(
    owner: Annotated[str, typer.Argument(help="Of the keys that it is for.")],
    sandboxes: Annotated[int | None, typer.Option(min=0, help="Alive at once.")] = None,
    cpu: Annotated[float | None, typer.Option(min=0, help="Processors of all together.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of all together: 256GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Of all together: 1TiB.")] = None,
    store: _Store = None,
) -> None:
    """Set what an owner's live sandboxes may be limited to, together. What is left out is free."""
    from coldframe.gateway.keys import set_quota
    from coldframe.protocol.models import Quota

    chosen = Quota(
        sandboxes=sandboxes,
        cpu=cpu,
        memory_bytes=None if memory is None else render.parse_size(memory),
        disk_bytes=None if disk is None else render.parse_size(disk),
    )
    _in_store(store, lambda opened: set_quota(opened, owner, chosen))


def _in_store(url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    from coldframe.gateway.store import open_store
    from coldframe.node.settings import NodeSettings

    async def opened() -> T:
        async with open_store(url, NodeSettings.from_environment().home) as store:
            return await work(store)

    return asyncio.run(opened())
