"""The store of images: names for stacks of layers, and what build steps made.

Every record is written aside and renamed into place, so a process that is killed, or a
machine that loses power, leaves an image whole or absent. Any number of processes share a
store. Layout and rules: docs/images.md
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from coldframe.images import names
from coldframe.images.aliases import Aliases, how_to_get
from coldframe.images.base import Healthcheck, HistoryEntry, Image, ImageConfig
from coldframe.images.disk import full_disk_named, sync_directory, write_record
from coldframe.images.layers import Layers
from coldframe.images.once import one_at_a_time, remove_if_free
from coldframe.protocol.errors import ImageDamagedError, ImageError, ImageNotFoundError

_ALWAYS_SAID = frozenset(("env", "workdir", "user", "cmd", "entrypoint", "labels"))


@dataclass(frozen=True)
class ImageRecord:
    """What the store keeps of one name."""

    name: str
    digest: str
    layers: tuple[str, ...]
    """Top first."""
    config: ImageConfig
    created_at: float
    """Unix seconds."""
    size_bytes: int
    """Sum of the layers' contents, those shared with other images included."""
    history: tuple[HistoryEntry, ...] = ()
    """How it was built, the oldest line first; empty where nobody noted it."""

    @property
    def image(self) -> Image:
        """The image as other rooms see it."""
        return Image(self.name, self.digest, self.layers, self.config)


@dataclass(frozen=True)
class Removal:
    """What a removal did."""

    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    in_use: tuple[str, ...] = ()
    """Layers that no name needs but a live process holds; a later `gc` removes them."""
    size_bytes: int = 0
    """Content of the removed layers."""


class ImageStore:
    """A directory of layers and names, for any number of threads and processes.

    `resolve`, `add_layer` and `tag` hold the layers that they name against removal by any
    process until `close` (or `release`), or until this process ends, however it ends.
    """

    def __init__(self, root: Path) -> None:
        """Open the store, making it if it is not there. Raises CapabilityError."""
        self.root = root
        self._layers = Layers(root)
        self.layers_directory = self._layers.directory
        self._refs = root / "refs"
        self._cache = root / "cache"
        self.aliases = Aliases(root, self._write)
        self._records: dict[Path, tuple[tuple[int, ...], ImageRecord]] = {}
        self._layers.prepare(self._refs, self._cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every layer that is held. Twice is fine."""
        self._layers.release()

    def release(self, layers: Iterable[str]) -> None:
        """Let go of layers that nothing of this process needs any more."""
        self._layers.release(layers)

    # --- reading --------------------------------------------------------------------------

    def resolve(self, name_or_digest: str) -> Image:
        """Return an image by name (`debian` is `debian:latest`) or digest, and hold its layers.

        A name that no image has may be an alias; the image then has its own name.

        Raises:
            ImageNotFoundError: there is none; the message says how to get one.
            InvalidRequestError: neither a name nor a digest.
            ImageDamagedError: the store's record is damaged.
        """
        record = self._find(name_or_digest)
        for digest in record.layers:
            if not self._layers.hold(digest):
                raise ImageNotFoundError(
                    f"image {record.name!r} lacks its layer {digest}: it was removed meanwhile, "
                    "or the store is damaged; make it again"
                )
        return record.image

    def inspect(self, name_or_digest: str) -> ImageRecord:
        """Return what is recorded of an image, holding nothing. Raises as `resolve` does."""
        digest = names.digest_of(name_or_digest)
        if digest is not None:
            for record in self.list():
                if record.digest == digest:
                    return record
            raise ImageNotFoundError(f"no image has the digest {digest}; see: coldframe image ls")
        name = names.normalise(name_or_digest)
        try:
            return self._read_ref(self._ref(name))
        except FileNotFoundError:
            raise ImageNotFoundError(self.aliases.why_none(name)) from None

    def _find(self, name_or_digest: str) -> ImageRecord:
        """Return an image's record, through aliases if no image has the name."""
        if names.digest_of(name_or_digest) is not None:
            return self.inspect(name_or_digest)
        name, digest = names.reference(name_or_digest)
        full = f"{name}@sha256:{digest}" if digest else name
        passed, wanted = [full], digest or name
        while True:
            with suppress(ImageNotFoundError):
                return self.inspect(wanted)
            target = self.aliases.target(passed[-1])
            if target in passed:
                raise ImageError(f"{full!r} is an alias that leads to itself: {target!r}")
            if target is None:
                known = [record.name for record in self.list()]
                if len(passed) == 1:
                    raise ImageNotFoundError(how_to_get(name, digest, known))
                why = how_to_get(wanted, None, known)
                raise ImageNotFoundError(f"{full!r} is an alias of {wanted!r}: {why}")
            passed.append(target)
            wanted = target

    def list(self) -> tuple[ImageRecord, ...]:
        """Return every named image, in order of their names.

        Raises:
            ImageDamagedError: a record is damaged.
        """
        records = []
        for path in sorted(self._refs.glob("*.json")):
            with suppress(FileNotFoundError):  # removed meanwhile
                records.append(self._read_ref(path))
        return tuple(records)

    def layer_root(self, digest: str) -> Path:
        """Return where a layer's tree lies."""
        return self._layers.tree(digest)

    # --- writing --------------------------------------------------------------------------

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A fresh directory on the store's file system, removed at the end.

        `gc` removes it too once the process that made it is gone.
        """
        with self._layers.workspace() as path:
            yield path

    def add_layer(self, tree: Path) -> str:
        """Move a tree (made inside a workspace of this store) in; return the layer's digest.

        The layer is held. The tree's own bookkeeping of overlayfs is stripped.

        Raises:
            ImageError: an entry no layer may hold, or a tree on another file system.
            StorageFullError: no space is left.
        """
        return self._layers.add(tree)

    def tag(
        self,
        name: str,
        layers: Sequence[str],
        config: ImageConfig,
        history: Sequence[HistoryEntry] = (),
    ) -> Image:
        """Give a stack of layers (top first) a name, replacing what had it; hold the layers.

        Raises:
            InvalidRequestError: not a name.
            ImageError: a layer is not in the store, or there is none.
        """
        name = names.normalise(name)
        layers = stacked(*layers)
        if not layers:
            raise ImageError(f"image {name!r} has no layers")
        for digest in layers:
            if not self._layers.hold(digest):
                raise ImageError(f"image {name!r}: layer {digest} is not in the store")
        size = sum(self._layers.size_bytes(digest) for digest in layers)
        digest = image_digest(layers, config)
        record = ImageRecord(name, digest, tuple(layers), config, time.time(), size, tuple(history))
        self._write(self._ref(name), asdict(record))
        return record.image

    def remember(self, key: str, layer: str) -> None:
        """Note that the build step `key` (64 hex digits) made `layer`. Raises StorageFullError."""
        self._write(self._cache / f"{key}.json", {"layer": layer})

    def recall(self, key: str) -> str | None:
        """Return, and hold, the layer that the build step `key` made; None if it is not there."""
        path = self._cache / f"{key}.json"
        try:
            layer = json.loads(path.read_bytes())["layer"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            return None
        return layer if isinstance(layer, str) and self._layers.hold(layer) else None

    @asynccontextmanager
    async def step(self, key: str, waiting: Callable[[], None]) -> AsyncIterator[None]:
        """Let one builder at a time do the build step `key`, in any process.

        `waiting` is called once if another is at it.
        """
        async with one_at_a_time(self._cache / f"{key}.lock", waiting):
            yield

    # --- removing -------------------------------------------------------------------------

    def remove(self, name_or_digest: str) -> Removal:
        """Drop a name, and the layers that no other image needs and no live process holds.

        A digest drops every name of that image. Sandboxes that run on it go on unharmed:
        their layers are kept, and a later `gc` removes them.

        Raises: as `inspect` does.
        """
        target = self.inspect(name_or_digest)
        by_digest = names.digest_of(name_or_digest) is not None
        with self._layers.changing():
            doomed = [
                record
                for record in self.list()
                if (record.digest == target.digest if by_digest else record.name == target.name)
            ]
            for record in doomed:
                self._ref(record.name).unlink(missing_ok=True)
            sync_directory(self._refs)
            layers = {layer for record in doomed for layer in record.layers}
            removal = self._layers.sweep(layers - self._needed())
        self._layers.empty_trash()
        return Removal(tuple(record.name for record in doomed), *removal)

    def unneeded(self) -> tuple[str, ...]:
        """Layers that no name needs; `gc` drops those that nothing holds."""
        with self._layers.changing():
            return tuple(sorted(self._layers.present() - self._needed()))

    def gc(self) -> Removal:
        """Drop layers that nothing names or holds, and what killed processes left half made."""
        with self._layers.changing():
            removal = self._layers.sweep(self._layers.present() - self._needed())
            for path in self._cache.glob("*.json"):
                if not self._remembered(path):
                    path.unlink(missing_ok=True)
            for path in self._cache.glob("*.lock"):
                remove_if_free(path)
            self._layers.retire()
        self._layers.empty_trash()
        return Removal((), *removal)

    # --- inside ---------------------------------------------------------------------------

    def _ref(self, name: str) -> Path:
        return self._refs / names.file_name(name)

    def _read_ref(self, path: Path) -> ImageRecord:
        """Read a record, or give the one that was read if the file is the same."""
        status = path.stat()
        key = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._records.get(path)
        if known is None or known[0] != key:
            known = self._records[path] = key, self._parse_ref(path)
        return known[1]

    def _parse_ref(self, path: Path) -> ImageRecord:
        try:
            raw = json.loads(path.read_bytes())
            config = _config(raw.pop("config"))
            history = tuple(HistoryEntry(**one) for one in raw.pop("history", ()))
            layers = tuple(raw.pop("layers"))
            return ImageRecord(config=config, layers=layers, history=history, **raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImageDamagedError(
                f"{path} is damaged ({error}); remove it and make it again"
            ) from error

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        with full_disk_named(), self.workspace() as work:
            write_record(path, content, work)

    def _needed(self) -> set[str]:
        return {layer for record in self.list() for layer in record.layers}

    def _remembered(self, path: Path) -> bool:
        try:
            layer = json.loads(path.read_bytes())["layer"]
        except (ValueError, KeyError, TypeError):
            return False
        return (self.layers_directory / str(layer)).is_dir()


def stacked(*layers: str) -> tuple[str, ...]:
    """Return a stack (top first) in which no layer is twice, which overlay refuses.

    All that a layer holds hides what the same one holds further below, so that one goes.
    """
    return tuple(dict.fromkeys(layers))


def image_digest(layers: Sequence[str], config: ImageConfig) -> str:
    """Return the digest of an image: its layers and configuration, not its name or date.

    What an image may lack, and does lack, is left out; docs/images.md fixes the form.
    """
    said = {key: value for key, value in asdict(config).items() if value or key in _ALWAYS_SAID}
    canonical = json.dumps(
        {"layers": list(layers), "config": said}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(b"coldframe-image-1\n" + canonical.encode()).hexdigest()


def _config(raw: dict[str, Any]) -> ImageConfig:
    check = raw.pop("healthcheck", None)
    if check is not None:
        check = Healthcheck(**{key: _frozen(value) for key, value in check.items()})
    return ImageConfig(healthcheck=check, **{key: _frozen(value) for key, value in raw.items()})


def _frozen(value: Any) -> Any:
    """Turn JSON's lists back into tuples."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value
