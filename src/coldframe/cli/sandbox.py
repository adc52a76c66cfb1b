"""`coldframe sandbox`: sandboxes of the service that COLDFRAME_URL names."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coldframe.cli import render
from coldframe.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from coldframe.client import SandboxClient

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_Id = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id or name.")]


@app.command()
def create(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Name or digest.")],
    name: Annotated[str | None, typer.Option(help="Unique among live sandboxes.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    cpu: Annotated[float | None, typer.Option(help="Processors, for example 0.5.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit: 512M, 4GiB.")] = None,
    ttl: Annotated[float, typer.Option(help="Seconds until it is deleted.")] = 7200.0,
    network: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="What it may reach; repeatable.")
    ] = None,
) -> None:
    """Make a sandbox that stays, and print its id."""
    wanted: dict[str, Any] = {
        "name": name,
        "cpu": cpu,
        "memory_bytes": None if memory is None else render.parse_size(memory),
        "network": network,
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    with _client() as client:
        sandbox = client.create_sandbox(image, ttl_s=ttl, labels=_labels(label), **given)
        sandbox.keep()
        print(sandbox.id)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_(
    sandbox: _Id,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="Program and arguments.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Kill everything after so many seconds.")
    ] = None,
) -> int:
    """Run a command in a sandbox; output comes as it is made, the exit code is the command's."""
    if not command:
        raise InvalidRequestError(f"no command: write coldframe sandbox exec {sandbox} -- CMD")
    stdin = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    with _client() as client:
        stream = client.get_sandbox(sandbox).stream(command, stdin=stdin, deadline_s=deadline)
        for chunk in stream:
            target = sys.stdout if chunk.stream == "stdout" else sys.stderr
            target.buffer.write(chunk.data)
            target.buffer.flush()
        assert stream.result is not None
        if stream.result.reason not in {"exit", "signal"}:
            print(f"coldframe: the command was cut short: {stream.result.reason}", file=sys.stderr)
        return stream.result.returncode


@app.command("ls")
def ls(
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """List live sandboxes."""
    with _client() as client:
        found = [sandbox.info for sandbox in client.list_sandboxes(_labels(label))]
    if as_json:
        print(json.dumps([info.model_dump(mode="json") for info in found], indent=2))
        return
    for info in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created_at))
        print(
            f"{info.id}  {info.state}  {info.spec.image}  {made}  {info.spec.name or ''}".rstrip()
        )


@app.command("rm")
def rm(
    sandboxes: Annotated[list[str], typer.Argument(metavar="SANDBOX...", help="Ids or names.")],
) -> None:
    """Delete sandboxes. One that has ended already is fine."""
    with _client() as client:
        for sandbox in sandboxes:
            client.delete_sandbox(sandbox)


def _labels(pairs: list[str] | None) -> dict[str, str]:
    result = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--label {pair!r}: write NAME=VALUE")
        result[name] = value
    return result


@contextmanager
def _client() -> Iterator[SandboxClient]:
    from coldframe.client import SandboxClient

    with SandboxClient() as client:
        yield client
