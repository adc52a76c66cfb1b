"""A RunStep for tests of this room: the kernel's overlay and a chroot, no isolation.

It writes real whiteouts and opaque directories, which is what the builder must cope with. The
sandboxed one is the node's, and is tested there.
"""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.images.base import BuildStep, StepResult
from coldframe.images.store import ImageStore
from coldframe.protocol.models import ExecRequest, ExecResult, Output, Reason


@dataclass
class ChrootStep:
    """Runs steps one by one and remembers them."""

    store: ImageStore
    ran: list[str | tuple[str, ...]] = field(default_factory=list)

    async def __call__(self, step: BuildStep) -> StepResult:
        """Run the step as its user, and return what came of it."""
        self.ran.append(step.command if step.command is not None else step.argv or ())
        argv = step.argv or ("/bin/sh", "-c", step.command or "")
        work, merged = step.target.with_name("work"), step.target.with_name("merged")
        work.mkdir()
        merged.mkdir()
        process = await asyncio.create_subprocess_exec(
            *("unshare", "-m", "/bin/sh", "-e", "-c", self._script(step, work, merged, argv)),
            env=dict(step.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        result = ExecResult(
            operation_id="op-test",
            sandbox_id="sb-test",
            reason=Reason.EXIT,
            exit_code=process.returncode,
            out=Output(total_bytes=len(out), head=out),
            err=Output(total_bytes=len(err), head=err),
            started_at=0,
            ended_at=0,
            duration_s=0,
            request=ExecRequest(argv=argv),
        )
        return StepResult(result)

    def _script(self, step: BuildStep, work: Path, merged: Path, argv: tuple[str, ...]) -> str:
        lowers = ":".join(str(self.store.layer_root(layer)) for layer in step.image.layers)
        inside = f"cd {shlex.quote(step.workdir)} && exec {shlex.join(argv)}"
        return (
            f"PATH=/usr/sbin:/usr/bin:/sbin:/bin mount -t overlay overlay "
            f"-o lowerdir={lowers},upperdir={step.target},workdir={work} {merged}\n"
            f"exec /usr/sbin/chroot --userspec={shlex.quote(step.user)} {merged} "
            f"/bin/sh -c {shlex.quote(inside)}"
        )
