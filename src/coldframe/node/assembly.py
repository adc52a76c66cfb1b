"""Which runtime and which images a node uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from coldframe import runtimes
from coldframe.images.base import Image
from coldframe.node.settings import NodeSettings
from coldframe.runtimes.base import Runtime

if TYPE_CHECKING:
    from coldframe.images.store import ImageStore


class ImageResolver(Protocol):
    """Whatever turns an image's name into its layers."""

    def resolve(self, name_or_digest: str, /) -> Image:
        """Return the image. Raises ImageNotFoundError, ImageError, InvalidRequestError."""


def assemble(
    settings: NodeSettings, node_id: str, runtime: Runtime | None, images: ImageResolver | None
) -> tuple[Runtime, ImageResolver]:
    """Return what was given, and make what was not.

    Raises:
        InvalidRequestError: the settings name a runtime that there is not.
    """
    if images is None:
        fake = settings.runtime == "fake" if runtime is None else runtime.name == "fake"
        images = _fake_images() if fake else _image_store(settings)
    if runtime is None:
        runtime = _make_runtime(settings, node_id, images)
    return runtime, images


def _make_runtime(settings: NodeSettings, node_id: str, images: ImageResolver) -> Runtime:
    made = runtimes.load(settings.runtime)
    if settings.runtime != "native":
        runtime: Runtime = made()
        return runtime
    from coldframe.images.store import ImageStore

    store = images if isinstance(images, ImageStore) else _image_store(settings)
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


def _image_store(settings: NodeSettings) -> ImageStore:
    from coldframe.images.store import ImageStore

    return ImageStore(settings.home / "images")
