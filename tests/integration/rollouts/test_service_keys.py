"""Rollouts over a service: what a key that may not build images can still run."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.gateway.identity import Scope
from coldframe.gateway.keys import create_key, revoke_key
from coldframe.gateway.store import open_store
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import SandboxStateError, Side
from coldframe.rollouts.config import RunConfig
from coldframe.rollouts.directory import RunDirectory
from coldframe.rollouts.run import Batch, RunResult
from tests.fixtures.service import serving
from tests.fixtures.waiting import until_asked
from tests.integration.rollouts.conftest import all_begun
from tests.unit.rollouts.tasks import write_task


async def test_key_that_is_revoked_in_the_middle_is_the_callers_and_never_a_reward(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """Nor is it tried again; what the run can no longer delete is said, and ends by its lease."""
    write_task(
        tmp_path / "tasks",
        toml='[environment]\nnetwork_mode = "no-network"\n',
        environment__Dockerfile="FROM busybox\n",
        solution__solve_sh="#!/bin/sh\ntouch /begun; until [ -e /go ]; do sleep 0.05; done\n",
    )
    images = image_store.layers_directory.parent
    with serving(tmp_path, "native", images=images) as service:
        async with (
            open_store(None, service.home) as store,
            AsyncSandboxClient(url=service.unix) as admin,
        ):
            key = await create_key(store, "ml", [Scope.READ, Scope.EXEC, Scope.CREATE, Scope.ADMIN])
            config = RunConfig(tasks=(tmp_path / "tasks",), harness="oracle", attempts=3)
            directory = RunDirectory(tmp_path / "out")
            with pytest.raises(SandboxStateError, match="left something behind: sandbox 'sb-"):
                async with AsyncSandboxClient(url=service.tcp, api_key=key) as client:
                    running = asyncio.create_task(Batch(client, config, directory).run())
                    await until_asked(lambda: all_begun(admin, 1))
                    await revoke_key(store, key)
                    (sandbox,) = await admin.list_sandboxes()
                    await sandbox.files.write("/go", b"")
                    async with asyncio.timeout(60):
                        await running
            for left in await admin.list_sandboxes():
                await left.delete()
    (trajectory,) = directory.results().values()

    assert trajectory.rewards is None
    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == (Side.CALLER, "not_authenticated")


async def test_image_that_is_there_is_taken_without_the_scope_to_build(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """The key that `key create` makes by default runs what an administrator has built."""
    write_task(
        tmp_path / "tasks",
        toml='[environment]\nnetwork_mode = "no-network"\n',
        environment__Dockerfile=f"FROM busybox\nRUN echo {uuid.uuid4()} > /made\n",
    )

    async def run(url: str, key: str | None, out: str) -> RunResult:
        config = RunConfig(tasks=(tmp_path / "tasks",), harness="oracle")
        async with AsyncSandboxClient(url=url, api_key=key) as client:
            return await Batch(client, config, RunDirectory(tmp_path / out)).run()

    images = image_store.layers_directory.parent
    with serving(tmp_path, "native", images=images) as service:
        async with open_store(None, service.home) as store:
            key = await create_key(store, "ml", [Scope.READ, Scope.EXEC, Scope.CREATE])
        before = await run(service.tcp, key, "before")
        built = await run(service.unix, None, "built")
        after = await run(service.tcp, key, "after")
        async with AsyncSandboxClient(url=service.tcp, api_key=key) as client:
            names = {one.name for one in await client.list_images()}

    (why,) = before.summary["refused"].values()
    assert "lacks the scope 'admin'" in why
    assert (built.all_verdicts, after.all_verdicts) == (True, True)
    assert any(name.startswith("task/one:") for name in names)
