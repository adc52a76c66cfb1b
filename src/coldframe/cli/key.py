"""`coldframe key`: keys and quotas of this machine's service."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group
from coldframe.cli.serve import STORE_OPTION
from coldframe.protocol.errors import CapabilityError, InvalidRequestError

if TYPE_CHECKING:
    from coldframe.gateway.store import Store
    from coldframe.protocol.models import Quota

app = group()

T = TypeVar("T")

_Store = Annotated[str | None, STORE_OPTION]


@app.command()
def create(
    owner: Annotated[str, typer.Option(help="Whose sandboxes it makes and sees.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help="read, exec, create or admin; repeatable. Default: the first three."),
    ] = None,
    as_json: flags.Json = False,
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
    made = _in_store(store, lambda opened: create_key(opened, owner, scopes))
    key_id = made.split("_")[1]
    _note("key create", key_id, owner)
    told = {"id": key_id, "owner": owner, "scopes": scopes, "key": made}
    print(json.dumps(told, indent=2) if as_json else made)


@app.command("ls")
def ls(as_json: flags.Json = False, store: _Store = None) -> None:
    """List keys, revoked ones too."""
    records = _in_store(store, lambda opened: opened.keys())
    if as_json:
        names = ("id", "owner", "scopes", "created_at", "revoked_at")
        found = [{name: getattr(one, name) for name in names} for one in records]
        print(json.dumps(found, indent=2))
        return
    rows = [
        (
            one.id,
            one.owner,
            ",".join(one.scopes),
            render.day(one.created_at),
            "valid" if one.revoked_at is None else "revoked",
        )
        for one in records
    ]
    render.listing(
        ("ID", "OWNER", "SCOPES", "MADE", "STATE"),
        rows,
        "no keys yet; make one with: coldframe key create --owner OWNER",
    )


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="Its id, or the key itself.")],
    as_json: flags.Json = False,
    store: _Store = None,
) -> None:
    """Refuse a key from the next request on."""
    from coldframe.gateway.keys import revoke_key

    revoked = _in_store(store, lambda opened: revoke_key(opened, key))
    _note("key revoke", revoked, None)
    print(json.dumps({"revoked": revoked}) if as_json else f"revoked {revoked}")


@app.command()
def quota(
    owner: Annotated[str, typer.Argument(help="Of the keys that it is for.")],
    sandboxes: Annotated[int | None, typer.Option(min=0, help="Alive at once.")] = None,
    cpu: Annotated[float | None, typer.Option(min=0, help="Processors of all together.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of all together: 256GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Of all together: 1TiB.")] = None,
    free: Annotated[bool, typer.Option("--free", help="Take every bound away.")] = False,
    as_json: flags.Json = False,
    store: _Store = None,
) -> None:
    """Set what an owner's live sandboxes may be limited to, together. What is left out is free.

    Without options: show it.
    """
    from coldframe.gateway.keys import set_quota
    from coldframe.protocol.models import Quota

    try:
        chosen = Quota(
            sandboxes=sandboxes,
            cpu=cpu,
            memory_bytes=None if memory is None else render.parse_size(memory),
            disk_bytes=None if disk is None else render.parse_size(disk),
        )
    except ValueError as error:
        raise InvalidRequestError("a quota is made of finite amounts of at least 0") from error
    if chosen != Quota() or free:
        _in_store(store, lambda opened: set_quota(opened, owner, chosen))
        _note("key quota", None, owner)
    else:
        chosen = _in_store(store, lambda opened: opened.quota(owner))
    print(json.dumps(chosen.model_dump(), indent=2) if as_json else _bounds(owner, chosen))


def _bounds(owner: str, quota: Quota) -> str:
    bounds = {
        "sandboxes": quota.sandboxes,
        "processors": quota.cpu,
        "memory": None if quota.memory_bytes is None else render.size(quota.memory_bytes),
        "disk": None if quota.disk_bytes is None else render.size(quota.disk_bytes),
    }
    said = ", ".join(f"{name} {most}" for name, most in bounds.items() if most is not None)
    return render.safe(f"{owner} may have at once: {said or 'as much as the node has'}")


def _note(command: str, key_id: str | None, owner: str | None) -> None:
    """Write a line of this machine's audit log."""
    from coldframe.gateway import audit
    from coldframe.gateway.settings import GatewaySettings
    from coldframe.node.settings import NodeSettings

    known = GatewaySettings(audit=NodeSettings.from_environment().home / audit.DIRECTORY)
    try:
        entries = audit.open_log(known)
    except CapabilityError as error:
        print(f"coldframe: done, but {error}", file=sys.stderr)
        return
    if entries is not None:
        entries.write(audit.of_command(command, key_id, owner))
        entries.close()


def _in_store(url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    from coldframe.gateway.store import open_store
    from coldframe.node.settings import NodeSettings

    async def opened() -> T:
        async with open_store(url, NodeSettings.from_environment().home) as store:
            return await work(store)

    return asyncio.run(opened())
