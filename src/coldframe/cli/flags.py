"""Flags and arguments of several commands, written once so that they mean the same in each."""

from __future__ import annotations

from typing import Annotated

import typer

Sandbox = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id or name; see sandbox ls.")]
Image = Annotated[str, typer.Argument(metavar="IMAGE", help="Name or digest; see image ls.")]
Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- CMD...", help="Program and arguments.")
]
Cpu = Annotated[float | None, typer.Option(help="Processors, for example 0.5.")]
Memory = Annotated[str | None, typer.Option(help="Memory limit: 512M, 4GiB.")]
Pids = Annotated[int | None, typer.Option(help="Processes and threads at most.")]
Disk = Annotated[str | None, typer.Option(help="What it may write: 1GiB.")]
Shm = Annotated[str | None, typer.Option(help="Size of /dev/shm: 512M, 4GiB.")]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Repeatable.")
]
User = Annotated[str | None, typer.Option("--user", "-u", help="NAME|ID[:GROUP].")]
Workdir = Annotated[str | None, typer.Option("--workdir", "-w", help="Where to start.")]
NoNewPrivileges = Annotated[
    bool, typer.Option("--no-new-privileges", help="Programs that are setuid gain nothing.")
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        help="What it may reach: files.example:443, *.example, 203.0.113.0/24, public, presets; "
        "repeatable. Default: nothing but itself.",
    ),
]
Deadline = Annotated[float | None, typer.Option(help="Kill everything after so many seconds.")]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Run on a terminal.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
ResultJson = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object at the end.")
]
