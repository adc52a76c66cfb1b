"""Layers on disk: trees by the digest of their content, held by locks while they are used.

Every layer is made below `tmp/`, synced, and renamed into place. The holder of a layer has a
shared lock on its `lock` file, which ends with the holder; a removal needs an exclusive one.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldframe.host import forks
from coldframe.images import names
from coldframe.images.digest import TreeDigest, digest_tree, strip_foreign_xattrs
from coldframe.images.disk import full_disk_named, sync_directory, sync_file_system
from coldframe.images.locks import locked, try_lock
from coldframe.images.trees import remove_tree
from coldframe.protocol.errors import CapabilityError, ImageDamagedError, ImageError


class Layers:
    """The layers of one store, and its work in progress. For threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "layers"
        self._tmp = root / "tmp"
        self._lock = root / "lock"
        self._held: dict[str, int] = {}
        self._guard = threading.Lock()
        # A store that is dropped without `close` must not keep layers from being removed.
        weakref.finalize(self, _close_all, self._held)
        forks.own(self)

    def prepare(self, *others: Path) -> None:
        """Make the directories. The root is closed to others: layers hold set-user-id files.

        Raises:
            CapabilityError: they cannot be written here.
        """
        try:
            with full_disk_named():
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                for path in (self.directory, self._tmp, *others):
                    path.mkdir(mode=0o755, exist_ok=True)
        except PermissionError as error:
            raise CapabilityError(
                f"images cannot be kept in {self.root}: {error.strerror}; run as root"
            ) from error
        except OSError as error:
            raise CapabilityError(
                f"images cannot be kept in {self.root}: {error.strerror}; set COLDFRAME_HOME to a "
                "directory that can be written"
            ) from error

    # --- holding --------------------------------------------------------------------------

    def tree(self, digest: str) -> Path:
        """Return where a layer's tree lies: the one place that knows how layers are kept."""
        return self.directory / digest / "root"

    def hold(self, digest: str) -> bool:
        """Take a shared lock on a layer, once; False if it is not there or about to go."""
        with self._guard:
            if digest in self._held:
                return True
            if names.digest_of(digest) != digest:
                return False
            try:
                fd = try_lock(self.directory / digest / "lock", exclusive=False)
            except (FileNotFoundError, NotADirectoryError):
                return False
            if fd is not None:
                self._held[digest] = fd
            return fd is not None

    def release(self, layers: Iterable[str] | None = None) -> None:
        """Let go of some layers, or of all."""
        with self._guard:
            for digest in tuple(self._held) if layers is None else layers:
                fd = self._held.pop(digest, None)
                if fd is not None:
                    os.close(fd)

    def abandon(self) -> None:
        """See `forks.Owner`."""
        _close_all(self._held)

    def size_bytes(self, digest: str) -> int:
        """Return the size of a layer's content. Raises ImageDamagedError if its record is."""
        path = self.directory / digest / "layer.json"
        try:
            return int(json.loads(path.read_bytes())["size_bytes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ImageDamagedError(
                f"{path} is damaged ({error}); remove the image and make it again"
            ) from error

    # --- making ---------------------------------------------------------------------------

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A fresh directory on the store's file system, removed at the end.

        `retire` removes it too once the process that made it is gone.

        Raises:
            CapabilityError: what is done within is for root.
            StorageFullError: no space is left.
        """
        with full_disk_named():
            path = self._tmp / f"work-{os.getpid()}-{secrets.token_hex(6)}"
            with self.changing():
                path.mkdir(mode=0o700)
                (path / "lock").touch(0o600)
                fd = try_lock(path / "lock", exclusive=True)
            try:
                yield path
            except PermissionError as error:
                if os.geteuid() == 0:
                    raise
                raise CapabilityError(
                    f"{error.strerror}: an image holds files of other owners; run it as root"
                ) from error
            finally:
                remove_tree(path)
                if fd is not None:
                    os.close(fd)

    def add(self, tree: Path) -> str:
        """Move a tree in; see `ImageStore.add_layer`, also for what it raises."""
        with full_disk_named(), self.workspace() as work:
            strip_foreign_xattrs(tree)
            found = digest_tree(tree)
            if self.hold(found.digest):
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

    def _land(self, layer: Path, found: TreeDigest) -> None:
        """Put a finished layer on disk and then in its place."""
        (layer / "lock").touch(0o644)
        record = {
            "digest": found.digest,
            "size_bytes": found.size_bytes,
            "entries": found.entries,
            "created_at": time.time(),
        }
        (layer / "layer.json").write_text(json.dumps(record))
        sync_file_system(layer)
        with self.changing():
            try:
                layer.rename(self.directory / found.digest)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # else another process has just made the same layer
            sync_directory(self.directory)
            if not self.hold(found.digest):
                raise ImageDamagedError(
                    f"layer {found.digest} is damaged: it has no lock file; "
                    "`coldframe gc` removes it when nothing needs it"
                )

    # --- removing -------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold off every other process that adds or removes. Short: no content is copied."""
        with locked(self._lock):
            yield

    def present(self) -> set[str]:
        """Return the digests of all layers."""
        return {path.name for path in self.directory.iterdir()}

    def sweep(self, layers: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        """Move layers that nobody holds to the trash; called while `changing`.

        Returns those moved, those held, and the bytes of those moved.
        """
        moved, held, size = [], [], 0
        for digest in sorted(layers):
            path = self.directory / digest
            try:
                fd = try_lock(path / "lock", exclusive=True)
            except (FileNotFoundError, NotADirectoryError):
                self._discard(path)  # no layer of ours: nothing can hold it
                continue
            if fd is None:
                held.append(digest)
                continue
            try:
                with suppress(ImageError):  # a damaged record must not keep the layer
                    size += self.size_bytes(digest)
                self._discard(path)
                moved.append(digest)
            finally:
                os.close(fd)
        sync_directory(self.directory)
        return tuple(moved), tuple(held), size

    def retire(self) -> None:
        """Move the work of processes that are gone to the trash; called while `changing`."""
        for work in self._tmp.glob("work-*"):
            try:
                fd = try_lock(work / "lock", exclusive=True)
            except FileNotFoundError:
                self._discard(work)
                continue
            if fd is not None:
                self._discard(work)
                os.close(fd)

    def empty_trash(self) -> None:
        """Delete what was moved away; not while `changing`, since it may take long."""
        for path in self._tmp.glob("trash-*"):
            remove_tree(path)

    def _discard(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            path.rename(self._tmp / f"trash-{secrets.token_hex(8)}")


def _close_all(held: dict[str, int]) -> None:
    while held:
        os.close(held.popitem()[1])
