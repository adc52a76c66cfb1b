"""A place to build in: a store, a context, and steps over a real overlay without walls."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldframe.images.base import Image
from coldframe.images.build import BuildOptions, build
from coldframe.images.store import ImageStore
from coldframe.images.view import MergedView
from coldframe.protocol.network import NetworkPolicy
from tests.integration.images.chroot_step import ChrootStep

Refuse = Callable[..., Awaitable[str]]
"""Builds what must be refused; returns the message without the Dockerfile's path."""


@dataclass
class Bench:
    """A store with busybox, a build context, and a way to build in it."""

    store: ImageStore
    context: Path
    steps: ChrootStep
    lines: list[str] = field(default_factory=list)

    def write(self, **files: str) -> None:
        for name, content in files.items():
            (self.context / name).write_text(content)

    async def build(self, text: str, *, cached: bool = True, **options: Any) -> Image:
        (self.context / "Dockerfile").write_text(text)
        return await build(
            self.store,
            "built",
            self.context,
            self.steps,
            options=BuildOptions(**options),
            network=NetworkPolicy(),
            cached=cached,
            progress=self.lines.append,
        )

    def view(self, image: Image) -> MergedView:
        return MergedView([self.store.layer_root(layer) for layer in image.layers])

    def read(self, image: Image, path: str) -> str | None:
        content = self.view(image).read(path.encode())
        return None if content is None else content.decode()

    def owner(self, image: Image, path: str) -> tuple[int, int, int]:
        status = self.view(image).resolve(path.encode()).stat
        assert status is not None, path
        return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
