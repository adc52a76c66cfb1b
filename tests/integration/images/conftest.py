"""Builds of a test's own, so that nothing is cached by others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldframe.images.bootstrap import bootstrap
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import DockerfileError
from tests.integration.images.bench import Bench, Refuse
from tests.integration.images.chroot_step import ChrootStep


@pytest.fixture
def bench(tmp_path: Path, image_store: ImageStore) -> Iterator[Bench]:
    """A store of the test's own, so that nothing is cached by others."""
    del image_store  # only root gets this far
    (tmp_path / "context").mkdir()
    with ImageStore(tmp_path / "images") as store:
        bootstrap(store, "busybox")
        yield Bench(store, tmp_path / "context", ChrootStep(store))


@pytest.fixture
def refuse(bench: Bench) -> Refuse:
    """Build what must be refused; return the message, and check that nothing ran or was kept."""

    async def refuse(text: str, **options: Any) -> str:
        before = bench.store.list()
        with pytest.raises(DockerfileError) as caught:
            await bench.build(text, **options)
        assert bench.store.list() == before
        assert list((bench.store.root / "tmp").iterdir()) == []
        message = str(caught.value)
        assert message.startswith(str(bench.context / "Dockerfile") + ":")
        return message.removeprefix(str(bench.context / "Dockerfile") + ":")

    return refuse
