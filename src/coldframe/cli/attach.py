"""Run a command in a sandbox on our own streams, and turn how it ended into an exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from coldframe.cli import render, stdio
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    ShellNotFoundError,
)

if TYPE_CHECKING:
    from coldframe.client import AsyncProcess, AsyncSandbox
    from coldframe.protocol.models import ExecResult, Stream

EXIT_DEADLINE = 124
EXIT_NOT_RUN = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


async def attached(
    sandbox: AsyncSandbox,
    command: list[str],
    *,
    tty: bool = False,
    quiet: bool = False,
    **options: Any,
) -> ExecResult:
    """Run a command on our own streams; with `quiet` only its result is wanted.

    Raises what `AsyncSandbox.start` does.
    """
    kind = stdio.stdin_kind()
    process = await sandbox.start(
        command,
        stdin_open=kind == "stream",
        pty=stdio.terminal_size() if tty else None,
        **options,
    )
    feeding = None
    if tty or kind == "stream":
        feeding = asyncio.create_task(stdio.pass_stdin(process))
    try:
        with stdio.forwarded_signals(process):
            if quiet:
                return await process.wait()
            if tty:
                with stdio.raw_terminal():
                    lost = await stdio.pass_output(process)
            else:
                lost = await stdio.pass_output(process)
            result = await process.wait()
    finally:
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    tell_lost(lost)
    return result


async def followed(process: AsyncProcess) -> ExecResult:
    """Copy a running command's output to ours until it ends, and leave it alone otherwise."""
    tell_lost(await stdio.pass_output(process, kill=False))
    return await process.wait()


async def print_so_far(process: AsyncProcess) -> None:
    """Print what a command has written until now, stdout and then stderr."""
    streams: tuple[tuple[Stream, TextIO], ...] = (("stdout", sys.stdout), ("stderr", sys.stderr))
    for stream, target in streams:
        cursor, lost = 0, 0
        while not (chunk := await process.read(stream, cursor, wait=False)).eof or chunk.data:
            if not chunk.data and not chunk.dropped_bytes:
                break
            lost += chunk.dropped_bytes
            cursor = chunk.next_cursor
            target.buffer.write(chunk.data)
        target.flush()
        tell_lost({stream: lost} if lost else {})


def tell_lost(lost: dict[str, int]) -> None:
    """Say on stderr what came too fast to be kept."""
    for stream, count in lost.items():
        print(f"coldframe: {count} bytes of {stream} came too fast and were lost", file=sys.stderr)


def failed(error: ColdframeError) -> int:
    """Say why a command was not run to its end; return an exit code that is hardly its own.

    What was asked for wrongly is raised again.
    """
    if isinstance(error, InvalidRequestError):
        raise error
    print(f"coldframe: {render.sentence(str(error))}", file=sys.stderr)
    if isinstance(error, ProgramNotFoundError | ShellNotFoundError):
        return EXIT_NOT_FOUND
    return EXIT_NOT_EXECUTABLE if isinstance(error, ProgramNotExecutableError) else EXIT_NOT_RUN


def exit_code(result: ExecResult) -> int:
    """Return the exit code for a result; say on stderr what an exit code cannot."""
    if result.reason == "deadline":
        after = result.request.deadline_s
        print(f"coldframe: the command was killed after {after:g} s (--deadline)", file=sys.stderr)
        return EXIT_DEADLINE
    if result.reason == "oom":
        print("coldframe: the command ran out of memory (--memory)", file=sys.stderr)
    elif result.reason not in {"exit", "signal"}:
        print(f"coldframe: the command was cut short: {result.reason}", file=sys.stderr)
        return EXIT_NOT_RUN
    return result.returncode


def show(result: ExecResult) -> None:
    """Print a result as one JSON object: output as text, its whole by length and digest."""
    value: dict[str, Any] = result.model_dump(mode="json", exclude={"out", "err"})
    value["returncode"] = result.returncode
    for name, output in (("stdout", result.out), ("stderr", result.err)):
        value[name] = output.window.decode("utf-8", "replace")
        value[f"{name}_bytes"] = output.total_bytes
        value[f"{name}_sha256"] = output.sha256
    print(json.dumps(value, indent=2))
