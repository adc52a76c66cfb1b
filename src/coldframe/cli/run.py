"""`coldframe run`: one command in a fresh sandbox, as if it were run here."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coldframe.cli import render, stdio
from coldframe.protocol.errors import (
    InvalidRequestError,
    NotExecutedError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    ShellNotFoundError,
)

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox
    from coldframe.protocol.models import ExecResult

EXIT_DEADLINE = 124
EXIT_NOT_EXECUTED = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


@dataclass(frozen=True)
class _Plan:
    """The command line, checked. None: the default of the SDK."""

    image: str
    command: list[str]
    tty: bool
    deadline_s: float | None
    sandbox: dict[str, Any] = field(default_factory=dict)


def run(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Name or digest; see image ls.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="Program and arguments.")
    ] = None,
    cpu: Annotated[float | None, typer.Option(help="Processors, for example 0.5.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit: 512M, 4GiB.")] = None,
    pids: Annotated[int | None, typer.Option(help="Processes and threads at most.")] = None,
    disk: Annotated[str | None, typer.Option(help="What it may write: 1GiB.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="NAME|ID[:GROUP].")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Where to start.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Kill everything after so many seconds.")
    ] = None,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Run on a terminal.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object at the end.")
    ] = False,
) -> int:
    """Run one command in a fresh sandbox of an image, and delete the sandbox.

    Output is passed on as it comes, stdin is passed in when it is piped (or with -t). The exit
    code is the command's own, 128 + N after signal N; 124 after the deadline, 126 not
    executable, 127 not found, 125 otherwise not started.
    """
    if not command:
        raise InvalidRequestError(
            f"no command: write for example `coldframe run {image} -- /bin/sh -c 'echo hello'`"
        )
    if tty and as_json:
        raise InvalidRequestError("--tty and --json contradict: a terminal shows what it does")
    sandbox: dict[str, Any] = {
        "cpu": cpu,
        "memory_bytes": None if memory is None else render.parse_size(memory),
        "pids": pids,
        "disk_bytes": None if disk is None else render.parse_size(disk),
        "env": render.parse_env(env or ()),
        "user": user,
        "workdir": workdir,
    }
    given = {name: value for name, value in sandbox.items() if value is not None}
    plan = _Plan(image, command, tty, deadline, given)
    try:
        return asyncio.run(_run(plan, as_json=as_json))
    except NotExecutedError as error:
        print(f"coldframe: {render.sentence(str(error))}", file=sys.stderr)
        return _not_executed(error)


def _not_executed(error: NotExecutedError) -> int:
    if isinstance(error, ProgramNotFoundError | ShellNotFoundError):
        return EXIT_NOT_FOUND
    return (
        EXIT_NOT_EXECUTABLE if isinstance(error, ProgramNotExecutableError) else EXIT_NOT_EXECUTED
    )


async def _run(plan: _Plan, *, as_json: bool) -> int:
    from coldframe.client import AsyncSandboxClient

    async with (
        AsyncSandboxClient(in_process=True) as client,
        # The sandbox ends with this process: a lease would only end long commands.
        await client.create_sandbox(plan.image, ttl_s=None, **plan.sandbox) as sandbox,
    ):
        result = await _attached(sandbox, plan, quiet=as_json)
    if as_json:
        print(json.dumps(describe(result), indent=2))
    return exit_code(result, plan.deadline_s)


async def _attached(sandbox: AsyncSandbox, plan: _Plan, *, quiet: bool) -> ExecResult:
    """Run the command on our own streams; with `quiet` only its result is wanted."""
    kind = stdio.stdin_kind()
    process = await sandbox.start(
        plan.command,
        stdin_open=kind == "stream",
        deadline_s=plan.deadline_s,
        pty=stdio.terminal_size() if plan.tty else None,
    )
    feeding = None
    if plan.tty or kind == "stream":
        feeding = asyncio.create_task(stdio.pass_stdin(process))
    try:
        with stdio.forwarded_signals(process):
            if quiet:
                return await process.wait()
            if plan.tty:
                with stdio.raw_terminal():
                    lost = await stdio.pass_output(process)
            else:
                lost = await stdio.pass_output(process)
            result = await process.wait()
    finally:
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    for stream, count in lost.items():
        print(f"coldframe: {count} bytes of {stream} came too fast and were lost", file=sys.stderr)
    return result


def exit_code(result: ExecResult, deadline_s: float | None) -> int:
    """Return the exit code for a result; say on stderr what an exit code cannot."""
    if result.reason == "deadline":
        print(
            f"coldframe: the command was killed after {deadline_s:g} s (--deadline)",
            file=sys.stderr,
        )
        return EXIT_DEADLINE
    if result.reason == "oom":
        print("coldframe: the command ran out of memory (--memory)", file=sys.stderr)
    elif result.reason not in {"exit", "signal"}:
        print(f"coldframe: the command was cut short: {result.reason}", file=sys.stderr)
        return 1
    return result.returncode


def describe(result: ExecResult) -> dict[str, Any]:
    """Return a result as plain JSON values: output as text, its whole by length and digest."""
    value: dict[str, Any] = result.model_dump(mode="json", exclude={"out", "err"})
    value["returncode"] = result.returncode
    for name, output in (("stdout", result.out), ("stderr", result.err)):
        value[name] = output.window.decode("utf-8", "replace")
        value[f"{name}_bytes"] = output.total_bytes
        value[f"{name}_sha256"] = output.sha256
    return value
