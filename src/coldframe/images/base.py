"""What an image is to the rooms above: a named stack of read-only layers and a configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of the processes that run on it."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/"
    user: str = "0"
    cmd: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Image:
    """A resolved image: read-only layers, top first, each a directory of the store."""

    name: str
    digest: str
    layers: tuple[str, ...]
    """Digests, top first; layer D's tree is `<layers directory>/<D>/root`."""
    config: ImageConfig
