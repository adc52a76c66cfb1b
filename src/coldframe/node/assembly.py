"""Which runtime and which images a node uses."""

from __future__ import annotations

from typing import Protocol

from coldframe.images.base import Image
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import InvalidRequestError
from coldframe.runtimes.base import Runtime


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
    if runtime is None:
        runtime = _make_runtime(settings, node_id)
    if images is None:
        images = _make_images(settings, runtime)  # makes the directories that runtimes look for
    return runtime, images


def _make_runtime(settings: NodeSettings, node_id: str) -> Runtime:
    if settings.runtime == "fake":
        from coldframe.runtimes.fake import FakeRuntime

        return FakeRuntime()
    if settings.runtime == "native":
        from coldframe.runtimes.native import NativeRuntime

        return NativeRuntime(
            node_id,
            settings.home / "images" / "layers",
            settings.home / "nodes" / node_id,
            storage=settings.storage,
            workers=settings.workers,
        )
    raise InvalidRequestError(
        f"runtime {settings.runtime!r} (COLDFRAME_RUNTIME) is not known: native, fake"
    )


def _make_images(settings: NodeSettings, runtime: Runtime) -> ImageResolver:
    if runtime.name == "fake":
        from coldframe.runtimes.fake import FakeImages

        return FakeImages()
    from coldframe.images.store import ImageStore

    return ImageStore(settings.home / "images")
