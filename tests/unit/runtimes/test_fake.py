"""The fake runtime ends what it started, whatever ends it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

_CHILD = """
import asyncio, sys
from pathlib import Path
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.runtimes.fake import FakeImages, FakeRuntime

async def main():
    runtime = FakeRuntime(Path(sys.argv[1]))
    await runtime.start()
    image = FakeImages().resolve("any")
    sandbox = await runtime.create("sb-aaaaaa-0000000001", SandboxSpec(image="any"), image)
    command = "(setsid sh -c 'echo $$ > pid; exec sleep 600' &); while [ ! -s pid ]; do :; done"
    await (await sandbox.start_exec(ExecRequest(command=command), "op-1")).wait()
    print((sandbox.directory / "pid").read_text(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_fake_whose_client_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Tests are killed too; a daemonised process or a directory each time would add up."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    pid = int(await asyncio.wait_for(child.stdout.readline(), 60))
    survivor = os.pidfd_open(pid)

    child.kill()
    await child.wait()

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(survivor, ended.set)
    await asyncio.wait_for(ended.wait(), 30)
    loop.remove_reader(survivor)
    os.close(survivor)
    async with asyncio.timeout(30):
        while list(tmp_path.iterdir()):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
