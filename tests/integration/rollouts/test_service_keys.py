"""Rollouts over a service: what a key that may not build images can still run."""

from __future__ import annotations

import uuid
from pathlib import Path

from coldframe.client import AsyncSandboxClient
from coldframe.gateway.identity import Scope
from coldframe.gateway.keys import create_key
from coldframe.gateway.store import open_store
from coldframe.images.store import ImageStore
from coldframe.rollouts.config import RunConfig
from coldframe.rollouts.directory import RunDirectory
from coldframe.rollouts.run import Batch, RunResult
from tests.fixtures.service import serving
from tests.unit.rollouts.tasks import write_task


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
