"""`coldframe sandbox session`: shells that live on between commands, and between ours."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from coldframe.cli import attach, flags, render, stdio
from coldframe.cli.clients import with_client
from coldframe.cli.groups import group
from coldframe.protocol.errors import ColdframeError, OperationNotFoundError
from coldframe.protocol.ids import new_operation_id

if TYPE_CHECKING:
    from coldframe.client import AsyncProcess, AsyncSandbox, AsyncSandboxClient
    from coldframe.protocol.models import ExecResult, SessionInfo

app = group()

_LOOK_S = 0.02
_Session = Annotated[
    str, typer.Argument(metavar="SESSION", help="Its id, as session start prints it.")
]


@app.command()
def start(
    sandbox: flags.Sandbox,
    shell: Annotated[str, typer.Option(help="Any POSIX shell of the image.")] = "/bin/sh",
    env: flags.Env = None,
    user: flags.User = None,
    workdir: flags.Workdir = None,
    as_json: flags.Json = False,
) -> None:
    """Start a shell that keeps its directory, variables and functions, and print its id.

    It needs nobody: it lives until `session close`, its own exit, or the end of its sandbox.
    """

    async def begin(client: AsyncSandboxClient) -> SessionInfo:
        box = await client.get_sandbox(sandbox)
        begun = await box.session(shell, env=render.parse_env(env or ()), user=user, cwd=workdir)
        return await begun.refresh()

    info = with_client(begin)
    print(info.model_dump_json(indent=2) if as_json else info.id)


@app.command("exec")
def exec_(
    sandbox: flags.Sandbox,
    session: _Session,
    line: Annotated[
        str, typer.Argument(metavar="LINE", help="One command line, quoted: 'cd src && make'.")
    ],
    env: flags.Env = None,
    deadline: Annotated[
        float, typer.Option(help="Kill it and the shell's background jobs after so many seconds.")
    ] = 300.0,
    as_json: flags.ResultJson = False,
) -> int:
    """Run a command line in the shell of a session, once those before it have ended.

    Output is passed on as it comes; it reads end of file. Ctrl-C goes to what the shell runs, a
    second one gives the line up; the shell stays. Exit codes are those of sandbox exec. `exit`
    ends the session. The directory, variables and functions are there for the next line.
    """

    async def run(client: AsyncSandboxClient) -> ExecResult:
        box = await client.get_sandbox(sandbox)
        shell = await box.attach_session(session)
        operation_id = new_operation_id()
        running = asyncio.ensure_future(
            shell.exec(
                line,
                env=render.parse_env(env or ()),
                deadline_s=deadline,
                operation_id=operation_id,
            )
        )
        process = await _once_known(box, operation_id, running)
        with stdio.forwarded_signals(process):
            if not as_json:
                attach.tell_lost(await stdio.pass_output(process))
            return await running

    try:
        result = with_client(run)
    except ColdframeError as error:
        return attach.failed(error)
    if as_json:
        attach.show(result)
    return attach.exit_code(result)


async def _once_known(
    box: AsyncSandbox, operation_id: str, running: asyncio.Future[ExecResult]
) -> AsyncProcess:
    """Return the handle of a command that was just asked for, or raise why there is none."""
    while True:
        try:
            return await box.attach(operation_id)
        except OperationNotFoundError:
            if running.done():
                running.result()
                raise
            await asyncio.wait({running}, timeout=_LOOK_S)


@app.command("ls")
def ls(sandbox: flags.Sandbox, as_json: flags.Json = False) -> None:
    """List the sessions of a sandbox whose shell lives, oldest first.

    What runs in one is a command as others: coldframe sandbox logs -f SANDBOX ID.
    """

    async def find(client: AsyncSandboxClient) -> tuple[SessionInfo, ...]:
        return await (await client.get_sandbox(sandbox)).sessions()

    found = with_client(find)
    if as_json:
        print(json.dumps([info.model_dump(mode="json") for info in found], indent=2))
        return
    rows = [(one.id, one.shell, render.day(one.started_at), one.running or "") for one in found]
    render.listing(
        ("SESSION", "SHELL", "STARTED", "RUNNING"),
        rows,
        f"no sessions; start one with: coldframe sandbox session start {sandbox}",
    )


@app.command()
def close(
    sandbox: flags.Sandbox,
    session: _Session,
    kill: Annotated[
        bool, typer.Option("--kill", help="At once, with all that it started.")
    ] = False,
    as_json: flags.Json = False,
) -> None:
    """End a session after its last command; what its commands left running runs on.

    One that has ended is fine.
    """

    async def end(client: AsyncSandboxClient) -> SessionInfo:
        box = await client.get_sandbox(sandbox)
        shell = await box.attach_session(session)
        await (shell.kill() if kill else shell.close())
        return await shell.refresh()

    info = with_client(end)
    if as_json:
        print(info.model_dump_json(indent=2))
