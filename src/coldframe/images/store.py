"""The store of images: layer directories by the digest of their content, and names for stacks.

Every write is made below `tmp/` and renamed into place once it is on disk, so a process that
is killed, or a machine that loses power, leaves an image whole or absent. Any number of
processes share a store. Layout and rules: docs/images.md
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from coldframe.images import names
from coldframe.images.base import Image, ImageConfig
from coldframe.images.digest import TreeDigest, digest_tree, strip_foreign_xattrs
from coldframe.images.locks import locked, try_lock
from coldframe.images.trees import NO_SPACE, remove_tree
from coldframe.protocol.errors import (
    CapabilityError,
    ImageError,
    ImageNotFoundError,
    StorageFullError,
)


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
        self.root = root
        self.layers_directory = root / "layers"
        self._refs = root / "refs"
        self._cache = root / "cache"
        self._tmp = root / "tmp"
        self._lock = root / "lock"
        self._held: dict[str, int] = {}
        self._guard = threading.Lock()
        self._prepare()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every layer that is held. Twice is fine."""
        self.release(tuple(self._held))

    def release(self, layers: Iterable[str]) -> None:
        """Let go of layers that this store holds and nothing of this process needs any more."""
        with self._guard:
            for digest in layers:
                fd = self._held.pop(digest, None)
                if fd is not None:
                    os.close(fd)

    # --- reading --------------------------------------------------------------------------

    def resolve(self, name_or_digest: str) -> Image:
        """Return an image by name (`debian` is `debian:latest`) or digest, and hold its layers.

        Raises:
            ImageNotFoundError: there is none; the message says how to get one.
            InvalidRequestError: neither a name nor a digest.
            ImageError: the store's record is damaged.
        """
        record = self.inspect(name_or_digest)
        for digest in record.layers:
            if not self._hold(digest):
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
            raise ImageNotFoundError(_how_to_get(name)) from None

    def list(self) -> tuple[ImageRecord, ...]:
        """Return every named image, in order of their names.

        Raises:
            ImageError: a record is damaged.
        """
        records = []
        for path in sorted(self._refs.glob("*.json")):
            with suppress(FileNotFoundError):  # removed meanwhile
                records.append(self._read_ref(path))
        return tuple(records)

    def layer_root(self, digest: str) -> Path:
        """Return where a layer's tree lies: the one place that knows how layers are kept."""
        return self.layers_directory / digest / "root"

    def has_layer(self, digest: str) -> bool:
        """Hold the layer if the store has it; False if it has not."""
        return self._hold(digest)

    # --- writing --------------------------------------------------------------------------

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A fresh directory on the store's file system, removed at the end.

        `gc` removes it too once the process that made it is gone.
        """
        with _full_disk_named():
            path = self._tmp / f"work-{os.getpid()}-{secrets.token_hex(6)}"
            with locked(self._lock):
                path.mkdir(mode=0o700)
                (path / "lock").touch(0o600)
                fd = try_lock(path / "lock", exclusive=True)
            try:
                yield path
            finally:
                remove_tree(path)
                if fd is not None:
                    os.close(fd)

    def add_layer(self, tree: Path) -> str:
        """Move a tree (made inside a workspace of this store) in; return the layer's digest.

        The layer is held. The tree's own bookkeeping of overlayfs is stripped.

        Raises:
            ImageError: an entry no layer may hold, or a tree on another file system.
            StorageFullError: no space is left.
        """
        with _full_disk_named(), self.workspace() as work:
            strip_foreign_xattrs(tree)
            found = digest_tree(tree)
            if self._hold(found.digest):
                remove_tree(tree)
                return found.digest
            layer = work / "layer"
            layer.mkdir(mode=0o755)
            try:
                tree.rename(layer / "root")
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                raise ImageError(f"{tree} is not on the file system of {self.root}") from error
            self._land(layer, found)
        return found.digest

    def tag(self, name: str, layers: Sequence[str], config: ImageConfig) -> Image:
        """Give a stack of layers (top first) a name, replacing what had it; hold the layers.

        Raises:
            InvalidRequestError: not a name.
            ImageError: a layer is not in the store, or there is none.
        """
        name = names.normalise(name)
        if not layers:
            raise ImageError(f"image {name!r} has no layers")
        for digest in layers:
            if not self._hold(digest):
                raise ImageError(f"image {name!r}: layer {digest} is not in the store")
        size = sum(int(self._layer_record(digest)["size_bytes"]) for digest in layers)
        record = ImageRecord(
            name, image_digest(layers, config), tuple(layers), config, time.time(), size
        )
        self._write_json(self._ref(name), asdict(record))
        return record.image

    def remember(self, key: str, layer: str) -> None:
        """Note that the build step `key` (64 hex digits) made `layer`. Raises StorageFullError."""
        self._write_json(self._cache / f"{key}.json", {"layer": layer})

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
        return layer if isinstance(layer, str) and self._hold(layer) else None

    # --- removing -------------------------------------------------------------------------

    def remove(self, name_or_digest: str) -> Removal:
        """Drop a name, and the layers that no other image needs and no live process holds.

        A digest drops every name of that image. Sandboxes that run on it go on unharmed:
        their layers are kept, and a later `gc` removes them.

        Raises: as `inspect` does.
        """
        target = self.inspect(name_or_digest)
        by_digest = names.digest_of(name_or_digest) is not None
        with locked(self._lock):
            doomed = [
                record
                for record in self.list()
                if (record.digest == target.digest if by_digest else record.name == target.name)
            ]
            for record in doomed:
                self._ref(record.name).unlink(missing_ok=True)
            sync_directory(self._refs)
            layers = {layer for record in doomed for layer in record.layers}
            removal = self._sweep(layers - self._needed())
        self._empty_trash()
        return Removal(tuple(record.name for record in doomed), *removal)

    def gc(self) -> Removal:
        """Drop layers that nothing names or holds, and what killed processes left half made."""
        with locked(self._lock):
            present = {path.name for path in self.layers_directory.iterdir()}
            removal = self._sweep(present - self._needed())
            for path in self._cache.iterdir():
                if not self._remembered(path):
                    path.unlink(missing_ok=True)
            for work in self._tmp.glob("work-*"):
                self._retire(work)
        self._empty_trash()
        return Removal((), *removal)

    # --- inside ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make the directories. The root is closed to others: layers hold set-user-id files."""
        try:
            with _full_disk_named():
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                for path in (self.layers_directory, self._refs, self._cache, self._tmp):
                    path.mkdir(mode=0o755, exist_ok=True)
        except PermissionError as error:
            raise CapabilityError(
                f"images cannot be kept in {self.root}: {error.strerror}; run as root"
            ) from error

    def _ref(self, name: str) -> Path:
        return self._refs / names.file_name(name)

    def _read_ref(self, path: Path) -> ImageRecord:
        try:
            raw = json.loads(path.read_bytes())
            config = ImageConfig(
                **{key: _frozen(value) for key, value in raw.pop("config").items()}
            )
            return ImageRecord(config=config, layers=tuple(raw.pop("layers")), **raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImageError(f"{path} is damaged ({error}); remove it and make it again") from error

    def _layer_record(self, digest: str) -> dict[str, Any]:
        path = self.layers_directory / digest / "layer.json"
        try:
            record = json.loads(path.read_bytes())
        except ValueError as error:
            raise ImageError(f"{path} is damaged ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("size_bytes"), int):
            raise ImageError(f"{path} is damaged")
        return record

    def _hold(self, digest: str) -> bool:
        """Take a shared lock on a layer, once; False if it is not there or about to go."""
        with self._guard:
            if digest in self._held:
                return True
            if names.digest_of(digest) != digest:
                return False
            try:
                fd = try_lock(self.layers_directory / digest / "lock", exclusive=False)
            except (FileNotFoundError, NotADirectoryError):
                return False
            if fd is not None:
                self._held[digest] = fd
            return fd is not None

    def _land(self, layer: Path, found: TreeDigest) -> None:
        """Put a finished layer on disk and then in its place."""
        (layer / "lock").touch(0o644)
        (layer / "layer.json").write_text(
            json.dumps(
                {
                    "digest": found.digest,
                    "size_bytes": found.size_bytes,
                    "entries": found.entries,
                    "created_at": time.time(),
                }
            )
        )
        sync_file_system(layer)
        with locked(self._lock):
            try:
                layer.rename(self.layers_directory / found.digest)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # else another process has just made the same layer
            sync_directory(self.layers_directory)
            if not self._hold(found.digest):
                raise ImageError(f"layer {found.digest} is damaged: it has no lock file")

    def _write_json(self, path: Path, content: dict[str, Any]) -> None:
        with _full_disk_named(), self.workspace() as work:
            made = work / "record"
            with made.open("w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            made.rename(path)
            sync_directory(path.parent)

    def _needed(self) -> set[str]:
        return {layer for record in self.list() for layer in record.layers}

    def _sweep(self, layers: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        """Move unheld layers to the trash; return those moved, those held, and bytes moved."""
        moved, held, size = [], [], 0
        for digest in sorted(layers):
            path = self.layers_directory / digest
            try:
                fd = try_lock(path / "lock", exclusive=True)
            except (FileNotFoundError, NotADirectoryError):
                self._discard(path)  # no layer of ours: nothing can hold it
                continue
            if fd is None:
                held.append(digest)
                continue
            try:
                size += int(self._layer_record(digest)["size_bytes"])
                self._discard(path)
                moved.append(digest)
            finally:
                os.close(fd)
        sync_directory(self.layers_directory)
        return tuple(moved), tuple(held), size

    def _retire(self, work: Path) -> None:
        try:
            fd = try_lock(work / "lock", exclusive=True)
        except FileNotFoundError:
            self._discard(work)
            return
        if fd is not None:
            self._discard(work)
            os.close(fd)

    def _discard(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            path.rename(self._tmp / f"trash-{secrets.token_hex(8)}")

    def _empty_trash(self) -> None:
        """Delete what was moved away; done without the lock, since it may take long."""
        for path in self._tmp.glob("trash-*"):
            remove_tree(path)

    def _remembered(self, path: Path) -> bool:
        try:
            layer = json.loads(path.read_bytes())["layer"]
        except (ValueError, KeyError, TypeError):
            return False
        return (self.layers_directory / str(layer)).is_dir()


def image_digest(layers: Sequence[str], config: ImageConfig) -> str:
    """Return the digest of an image: its layers and configuration, not its name or date."""
    canonical = json.dumps(
        {"layers": list(layers), "config": asdict(config)}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(b"coldframe-image-1\n" + canonical.encode()).hexdigest()


def sync_file_system(path: Path) -> None:
    """Wait until everything written to the file system of `path` is on disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the renames in one directory last through a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _full_disk_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise StorageFullError(f"no space is left for images: {error}") from error


def _frozen(value: Any) -> Any:
    """Turn JSON's lists back into tuples."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


def _how_to_get(name: str) -> str:
    repository = name.partition(":")[0]
    make = f"coldframe image import {name} ROOTFS.tar, or coldframe image build -t {name} DIRECTORY"
    if repository in ("debian", "busybox"):
        make = f"coldframe image bootstrap {name.removesuffix(':latest')}"
    return f"no image {name!r} in the store; make it with: {make}"
