"""Which runtime and which images a node uses."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from coldframe import runtimes
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node.settings import NodeSettings
from coldframe.runtimes.base import Runtime


class ImageResolver(Protocol):
    """Whatever turns an image's name into its layers."""

    def resolve(self, name_or_digest: str, /) -> Image:
        """Return the image. Raises ImageNotFoundError, ImageError, InvalidRequestError."""


def assemble(
    settings: NodeSettings,
    node_id: str,
    runtime: Runtime | None,
    images: ImageResolver | None,
    undo: ExitStack,
) -> tuple[Runtime, ImageResolver]:
    """Return what was given, and make what was not; `undo` closes the stores that were made.

    Raises:
        InvalidRequestError: the settings name a runtime that there is not.
    """
    if images is None:
        fake = settings.runtime == "fake" if runtime is None else runtime.name == "fake"
        images = _fake_images() if fake else _image_store(settings, undo)
    if runtime is None:
        runtime = _make_runtime(settings, node_id, images, undo)
    return runtime, images


def _make_runtime(
    settings: NodeSettings, node_id: str, images: ImageResolver, undo: ExitStack
) -> Runtime:
    made = runtimes.load(settings.runtime)
    if settings.runtime != "native":
        runtime: Runtime = made()
        return runtime
    store = images if isinstance(images, ImageStore) else _image_store(settings, undo)
    native: Runtime = made(
        node_id,
        store.layers_directory,
        settings.home / "nodes" / node_id,
        storage=settings.storage,
        workers=settings.workers,
    )
    return native


def _fake_images() -> ImageResolver:
    from coldframe.runtimes.fake import FakeImages

    return FakeImages()


def _image_store(settings: NodeSettings, undo: ExitStack) -> ImageStore:
    return undo.enter_context(ImageStore(settings.home / "images"))
