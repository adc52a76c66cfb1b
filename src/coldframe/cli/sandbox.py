"""`coldframe sandbox`: sandboxes that outlive the command which made them.

They are on the machine's node, which is started if there is none, or on the service that
COLDFRAME_URL names.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coldframe.cli import attach, flags, render, stdio
from coldframe.cli.clients import with_client
from coldframe.cli.groups import group
from coldframe.cli.limits import sandbox_options
from coldframe.cli.sandbox_copy import cp
from coldframe.cli.sandbox_port import port
from coldframe.cli.sandbox_session import app as session
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    ProgramNotFoundError,
    SandboxStateError,
)

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient
    from coldframe.protocol.models import ExecInfo, ExecResult, SandboxInfo

_SHOWN_LINE = 60
"""Characters of a command line in a table; --json has more."""

app = group()
app.command("cp")(cp)
app.command("port")(port)
app.add_typer(session, name="session", help="Shells in a sandbox that live on between commands.")


@app.command()
def create(
    image: flags.Image,
    name: Annotated[str | None, typer.Option(help="Unique among live sandboxes.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    cpu: flags.Cpu = None,
    memory: flags.Memory = None,
    pids: flags.Pids = None,
    disk: flags.Disk = None,
    shm: flags.Shm = None,
    env: flags.Env = None,
    user: flags.User = None,
    workdir: flags.Workdir = None,
    ttl: Annotated[
        str,
        typer.Option(
            metavar="SECONDS|never",
            help="When its lease ends; then it can be read for a while. never: it has none.",
        ),
    ] = "7200",
    network: flags.Network = None,
    no_new_privileges: flags.NoNewPrivileges = False,
    as_json: flags.Json = False,
) -> None:
    """Make a sandbox that stays, and print its id.

    It lives until its lease ends (--ttl) or `coldframe sandbox rm`. For one command in a sandbox
    that goes with it: coldframe run.
    """
    given = sandbox_options(
        image,
        name=name,
        cpu=cpu,
        memory=memory,
        pids=pids,
        disk=disk,
        shm=shm,
        env=env,
        user=user,
        workdir=workdir,
        labels=_labels(label),
        network=network,
        no_new_privileges=no_new_privileges,
        ttl=ttl,
    )

    async def make(client: AsyncSandboxClient) -> SandboxInfo:
        sandbox = await client.create_sandbox(image, **given)
        sandbox.keep()
        return sandbox.info

    info = with_client(make)
    print(info.model_dump_json(indent=2) if as_json else info.id)


@app.command("exec")
def exec_(
    sandbox: flags.Sandbox,
    command: flags.Command = None,
    env: flags.Env = None,
    user: flags.User = None,
    workdir: flags.Workdir = None,
    deadline: flags.Deadline = None,
    tty: flags.Tty = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Print the command's id and go; see sandbox logs."),
    ] = False,
    as_json: flags.ResultJson = False,
) -> int:
    """Run a command in a sandbox, as if it were run here.

    Output is passed on as it comes, stdin is passed in when it is piped (or with -t). The exit
    code is the command's own, 128 + N after signal N; 124 after the deadline, 126 not
    executable, 127 not found, 125 when it or the sandbox failed otherwise, 2 for wrong use.
    """
    if not command:
        raise InvalidRequestError(f"no command: write coldframe sandbox exec {sandbox} -- CMD")
    if tty and (as_json or detach):
        raise InvalidRequestError("--tty contradicts --json and --detach: a terminal is watched")
    options = _options(env, user, workdir) | {"deadline_s": deadline}

    async def run(client: AsyncSandboxClient) -> ExecResult | str:
        box = await client.get_sandbox(sandbox)
        if detach:
            return (await box.start(command, **options)).operation_id
        return await attach.attached(box, command, tty=tty, quiet=as_json, **options)

    try:
        result = with_client(run)
    except ColdframeError as error:
        return attach.failed(error)
    if isinstance(result, str):
        print(json.dumps({"operation_id": result}) if as_json else result)
        return 0
    if as_json:
        attach.show(result)
    return attach.exit_code(result)


@app.command()
def shell(
    sandbox: flags.Sandbox,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD...", help="Default: /bin/bash, else /bin/sh."),
    ] = None,
    env: flags.Env = None,
    user: flags.User = None,
    workdir: flags.Workdir = None,
) -> int:
    """Open a shell in a sandbox, on this terminal.

    Every key goes to the sandbox, Ctrl-C too; leave with `exit` or Ctrl-D. What is left running
    there runs on. The exit code is the shell's.
    """
    if stdio.stdin_kind() != "terminal":
        raise InvalidRequestError(
            f"a shell needs a terminal; for scripts: coldframe sandbox exec {sandbox} -- CMD"
        )
    options = _options(env, user, workdir)
    options["env"] = {"TERM": stdio.terminal_kind(), **options["env"]}

    async def run(client: AsyncSandboxClient) -> ExecResult:
        box = await client.get_sandbox(sandbox)
        if command:
            return await attach.attached(box, command, tty=True, **options)
        try:
            return await attach.attached(box, ["/bin/bash"], tty=True, **options)
        except ProgramNotFoundError:
            return await attach.attached(box, ["/bin/sh"], tty=True, **options)

    try:
        return attach.exit_code(with_client(run))
    except ColdframeError as error:
        return attach.failed(error)


@app.command()
def logs(
    sandbox: flags.Sandbox,
    command: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="The command's id, as exec --detach prints it."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until it ends; then exit with its code.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Its result as one JSON object, once it ended; or the list."),
    ] = False,
) -> int:
    """Print the output of a command that runs or ran in a sandbox, from its first byte on.

    Without ID: list the newest 1,000 commands whose results are kept, oldest first. To end this
    ends nothing there. Where the exit code is the command's (--follow, --json with ID) it is as
    of sandbox exec.
    """

    if command is None:
        if follow:
            raise InvalidRequestError(
                f"--follow needs an ID; they are listed by coldframe sandbox logs {sandbox}"
            )
        _list_commands(sandbox, as_json=as_json)
        return 0

    async def run(client: AsyncSandboxClient) -> ExecResult | None:
        box = await client.get_sandbox(sandbox)
        process = await box.attach(command)
        if as_json:
            ended = await process.wait() if follow else await process.poll()
            if ended is None:
                raise SandboxStateError(f"command {command} has not ended: wait with --follow")
            return ended
        if follow:
            return await attach.followed(process)
        await attach.print_so_far(process)
        return None

    try:
        result = with_client(run)
    except ColdframeError as error:
        if not (follow or as_json):
            raise
        return attach.failed(error)
    if as_json and result is not None:
        attach.show(result)
    return 0 if result is None else attach.exit_code(result)


def _list_commands(sandbox: str, *, as_json: bool) -> None:
    async def find(client: AsyncSandboxClient) -> tuple[ExecInfo, ...]:
        return await (await client.get_sandbox(sandbox)).commands()

    found = with_client(find)
    if as_json:
        print(json.dumps([info.model_dump(mode="json") for info in found], indent=2))
        return
    rows = [
        (
            one.operation_id,
            "-" if one.started_at is None else render.moment(one.started_at),
            _progress(one),
            render.sentence(one.command_line)[:_SHOWN_LINE],
        )
        for one in found
    ]
    render.listing(
        ("ID", "STARTED", "STATE", "COMMAND"),
        rows,
        f"no commands; start one with: coldframe sandbox exec --detach {sandbox} -- CMD",
    )


def _progress(one: ExecInfo) -> str:
    """Say whether it runs, or how it ended."""
    if one.failure is not None:
        return "failed"
    if one.reason is None:
        return "waiting" if one.started_at is None else "running"
    if one.reason == "exit":
        return f"exit {one.exit_code}"
    return f"signal {one.signal}" if one.reason == "signal" else str(one.reason)


@app.command("ls")
def ls(
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    as_json: flags.Json = False,
) -> None:
    """List live sandboxes, oldest first; with labels those that carry all of them."""

    async def find(client: AsyncSandboxClient) -> list[SandboxInfo]:
        return [box.info for box in await client.list_sandboxes(_labels(label))]

    found = with_client(find)
    if as_json:
        print(json.dumps([info.model_dump(mode="json") for info in found], indent=2))
        return
    rows = [
        (info.id, _state(info), info.spec.image, render.day(info.created_at), info.spec.name or "")
        for info in found
    ]
    render.listing(
        ("SANDBOX", "STATE", "IMAGE", "MADE", "NAME"),
        rows,
        "no live sandboxes; make one with: coldframe sandbox create IMAGE",
    )


@app.command("rm")
def rm(
    sandboxes: Annotated[list[str], typer.Argument(metavar="SANDBOX...", help="Ids or names.")],
    as_json: flags.Json = False,
) -> None:
    """Delete sandboxes; nothing of them is left when this returns. One that has ended is fine.

    None is deleted when one is not known.
    """

    async def delete(client: AsyncSandboxClient) -> None:
        # By id: the same may be named twice, and a name is known only while it lives.
        for found in [await client.get_sandbox(one) for one in sandboxes]:
            await client.delete_sandbox(found.id)

    with_client(delete)
    if as_json:
        print(json.dumps({"deleted": sandboxes}))


def _state(info: SandboxInfo) -> str:
    if info.kept_until is None or info.ended_at is not None:
        return info.state
    return f"{info.state}; {info.reason}, kept until {render.day(info.kept_until)}"


def _options(env: list[str] | None, user: str | None, workdir: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"env": render.parse_env(env or ())}
    if user is not None:
        options["user"] = user
    if workdir is not None:
        options["cwd"] = workdir
    return options


def _labels(pairs: list[str] | None) -> dict[str, str]:
    result = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--label {pair!r}: write NAME=VALUE")
        result[name] = value
    return result
