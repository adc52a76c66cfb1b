"""What a native sandbox has written over its image: looked at, compared, exported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from coldframe.host.export import export_layer
from coldframe.host.fsthreads import run_to_its_end
from coldframe.host.patience import Patience
from coldframe.host.roottree import closing
from coldframe.host.storage_base import Storage
from coldframe.host.treewalk import DIRECTORY
from coldframe.protocol.models import FileChanges
from coldframe.runtimes.file_marks import MarksInDirectory, changes
from coldframe.runtimes.image_changes import digest_changes


class NativeUpper:
    """The writable directory of one sandbox, beside the layers (top first) below it."""

    def __init__(self, sandbox_id: str, storage: Storage, layers: Sequence[Path]) -> None:
        self._sandbox_id, self._storage, self._layers = sandbox_id, storage, layers

    async def widen(self, disk_bytes: int) -> None:
        """Let it hold so much. Raises as `Storage.widen`."""
        await run_to_its_end(self._storage.widen, self._sandbox_id, disk_bytes)

    async def export(self, target: Path) -> None:
        """Copy it as a layer. The content of `target` is durable only once synced.

        Raises StorageFullError.
        """
        directory = self._storage.open(self._sandbox_id)
        await run_to_its_end(export_layer, directory, b"upper", target)

    async def digest(self, seed: bytes, limit_s: float) -> str:
        """See `KnowsChanges.digest_changes`."""
        patience = Patience(limit_s)
        with self.open() as upper:
            return await run_to_its_end(
                digest_changes,
                *(upper, self._layers, patience, seed),
                cancelled=patience.lose,
            )

    async def changes(self, since: str | None, most: int, limit_s: float) -> FileChanges:
        """See `SandboxHandle.changes`."""
        patience = Patience(limit_s)
        with closing(self._storage.open(self._sandbox_id)) as directory, self.open() as upper:
            return await run_to_its_end(
                partial(changes, most=most, patience=patience),
                *(upper, self._layers, MarksInDirectory(directory), since),
                cancelled=patience.lose,
            )

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor of what was written, in layer form."""
        with (
            closing(self._storage.open(self._sandbox_id)) as directory,
            closing(os.open("upper", DIRECTORY, dir_fd=directory)) as upper,
        ):
            yield upper
