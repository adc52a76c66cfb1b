"""The fake runtime ends what it started, whatever ends it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from coldframe.protocol.models import SandboxSpec
from coldframe.runtimes.fake import FakeImages, FakeRuntime
from tests.fixtures.waiting import until

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
    await until(lambda: not list(tmp_path.iterdir()))


async def test_fake_export_that_is_cancelled_copies_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy would go on in a directory that its caller has given up."""
    copier = tmp_path / "bin" / "cp"
    copier.parent.mkdir()
    said = tmp_path / "pid"
    copier.write_text(f"#!/bin/sh\necho $$ > {said}.new; mv {said}.new {said}; exec sleep 600\n")
    copier.chmod(0o755)
    monkeypatch.setenv("PATH", f"{copier.parent}:{os.environ['PATH']}")
    runtime = FakeRuntime(tmp_path / "base")
    await runtime.start()
    try:
        image = FakeImages().resolve("any")
        sandbox = await runtime.create("sb-aaaaaa-0000000001", SandboxSpec(image="any"), image)
        export = asyncio.ensure_future(sandbox.export_upper(tmp_path / "out"))
        await until(said.exists)
        export.cancel()
        with pytest.raises(asyncio.CancelledError):
            await export
        pid = int(said.read_text())
        assert not Path(f"/proc/{pid}").exists()  # noqa: ASYNC240
    finally:
        await runtime.close()
