"""`coldframe run`: one command in a fresh sandbox, as if it were run here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from coldframe.cli import attach, flags
from coldframe.cli.limits import sandbox_options
from coldframe.protocol.errors import ColdframeError, InvalidRequestError


@dataclass(frozen=True)
class _Plan:
    """The command line, checked. None: the default of the SDK."""

    image: str
    command: list[str]
    tty: bool
    deadline_s: float | None
    sandbox: dict[str, Any] = field(default_factory=dict)


def run(
    image: flags.Image,
    command: flags.Command = None,
    cpu: flags.Cpu = None,
    memory: flags.Memory = None,
    pids: flags.Pids = None,
    disk: flags.Disk = None,
    shm: flags.Shm = None,
    env: flags.Env = None,
    user: flags.User = None,
    workdir: flags.Workdir = None,
    network: flags.Network = None,
    no_new_privileges: flags.NoNewPrivileges = False,
    deadline: flags.Deadline = None,
    tty: flags.Tty = False,
    as_json: flags.ResultJson = False,
) -> int:
    """Run one command in a fresh sandbox of an image, and delete the sandbox.

    The sandbox has no lease: it lasts as long as the command, for which --deadline is.

    Output is passed on as it comes, stdin is passed in when it is piped (or with -t). The exit
    code is the command's own, 128 + N after signal N; 124 after the deadline, 126 not
    executable, 127 not found, 125 when it or the sandbox failed otherwise, 2 for wrong use.
    """
    if not command:
        raise InvalidRequestError(
            f"no command: write for example `coldframe run {image} -- /bin/sh -c 'echo hello'`"
        )
    if tty and as_json:
        raise InvalidRequestError("--tty and --json contradict: a terminal shows what it does")
    given = sandbox_options(
        image,
        cpu=cpu,
        memory=memory,
        pids=pids,
        disk=disk,
        shm=shm,
        env=env,
        user=user,
        workdir=workdir,
        network=network,
        no_new_privileges=no_new_privileges,
    )
    plan = _Plan(image, command, tty, deadline, given)
    try:
        return asyncio.run(_run(plan, as_json=as_json))
    except ColdframeError as error:
        return attach.failed(error)


async def _run(plan: _Plan, *, as_json: bool) -> int:
    from coldframe.client import AsyncSandboxClient

    async with (
        AsyncSandboxClient(in_process=True) as client,
        # The sandbox ends with this process: a lease would only end long commands.
        await client.create_sandbox(plan.image, ttl_s=None, **plan.sandbox) as sandbox,
    ):
        result = await attach.attached(
            sandbox, plan.command, tty=plan.tty, quiet=as_json, deadline_s=plan.deadline_s
        )
    if as_json:
        attach.show(result)
    return attach.exit_code(result)
