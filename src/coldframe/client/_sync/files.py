# Generated from _async/files.py; do not edit.
"""A sandbox's files, reached from outside: no program of the image takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.client import _transfer as transfer
from coldframe.client._arguments import typed_methods
from coldframe.client._content import Content
from coldframe.client._requests import check_codec
from coldframe.protocol.models import GIB, MIB, FileEntry, FileStat

if TYPE_CHECKING:
    from coldframe.client._inside import SandboxCore
    from coldframe.client._portal import Portal

Owner = tuple[int, int] | None


@typed_methods
class Files:
    """Files of one sandbox. Paths are absolute in it, text or bytes; links stay inside it.

    Everything raises PathNotFoundError, PathRefusedError (devices, FIFOs, sockets, /proc and
    the like), PathExistsError, StorageFullError, SandboxGoneError, SandboxStateError, FileError.

    What changes something takes an `operation_id`: the same id again gives the first answer and
    changes nothing. It raises OperationMismatchError (the id stands for something else, or for
    other content), OperationExpiredError.
    """

    def __init__(self, core: SandboxCore, runner: Portal) -> None:
        self._core, self._portal = core, runner

    # --- contents ---------------------------------------------------------------------

    def read(
        self,
        path: str | bytes,
        *,
        offset: int = 0,
        length: int | None = None,
        max_bytes: int = 64 * MIB,
    ) -> bytes:
        """Return a file's content, or `length` bytes of it from `offset` on.

        Raises:
            FileTooLargeError: it is more than `max_bytes`; use `iterate` or `download`.
        """
        return self._portal.run(transfer.read(self._core, path, offset, length, max_bytes))

    def read_text(
        self, path: str | bytes, *, encoding: str = "utf-8", errors: str = "strict"
    ) -> str:
        """Return a file's content as text. Raises UnicodeDecodeError if it is not."""
        check_codec(encoding, errors)
        return (self.read(path)).decode(encoding, errors)

    def iterate(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        """Iterate a file's content in pieces of at most 1 MiB."""
        return self._portal.iterate(transfer.iterate(self._core, path, offset, length))

    def write(
        self,
        path: str | bytes,
        content: Content,
        *,
        mode: int = 0o644,
        owner: Owner = None,
        parents: bool = True,
        operation_id: str | None = None,
    ) -> int:
        """Write a file atomically and return its size; content is streamed.

        Args:
            path: what is there already keeps its mode and owner.
            content: bytes, text (as UTF-8), a file object, or an iterable of bytes.
            mode: of a new file.
            owner: ids in the sandbox of a new file and new parents; None: its default user.
            parents: make missing directories.
        """
        return self._portal.run_with(
            partial(
                transfer.write,
                self._core,
                path,
                mode=mode,
                owner=owner,
                parents=parents,
                operation_id=operation_id,
            ),
            content,
        )

    def download(self, path: str | bytes, local: str | Path) -> int:
        """Copy a file of the sandbox to a local one, atomically; return its size."""
        return self._portal.run(transfer.download(self._core, path, Path(local)))

    def upload(
        self,
        local: str | Path,
        path: str | bytes,
        *,
        mode: int | None = None,
        owner: Owner = None,
        parents: bool = True,
        operation_id: str | None = None,
    ) -> int:
        """Copy a local file into the sandbox; return its size. Mode None: the local file's."""
        return self._portal.run(
            transfer.upload(
                self._core,
                Path(local),
                path,
                mode=mode,
                owner=owner,
                parents=parents,
                operation_id=operation_id,
            )
        )

    # --- names ------------------------------------------------------------------------

    def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat:
        """Return what a path is; with `follow` false, of a link itself."""
        return self._portal.run(transfer.stat(self._core, path, follow))

    def exists(self, path: str | bytes, *, follow: bool = True) -> bool:
        """Whether there is such a path."""
        return self._portal.run(transfer.exists(self._core, path, follow))

    def list(self, path: str | bytes) -> tuple[FileEntry, ...]:
        """Return what is in a directory; names are bytes, and hostile."""
        return self._portal.run(transfer.list_directory(self._core, path))

    def mkdir(
        self,
        path: str | bytes,
        *,
        mode: int = 0o755,
        owner: Owner = None,
        parents: bool = True,
        exist_ok: bool = True,
        operation_id: str | None = None,
    ) -> None:
        """Make a directory."""
        self._portal.run(
            transfer.mkdir(
                self._core,
                path,
                mode=mode,
                owner=owner,
                parents=parents,
                exist_ok=exist_ok,
                operation_id=operation_id,
            )
        )

    def move(
        self, source: str | bytes, target: str | bytes, *, operation_id: str | None = None
    ) -> None:
        """Rename; an existing file at the target is replaced."""
        self._portal.run(transfer.move(self._core, source, target, operation_id))

    def remove(
        self, path: str | bytes, *, recursive: bool = False, operation_id: str | None = None
    ) -> None:
        """Remove a file or an empty directory, or with `recursive` whatever is there."""
        self._portal.run(transfer.remove(self._core, path, recursive, operation_id))

    def chmod(self, path: str | bytes, mode: int, *, operation_id: str | None = None) -> None:
        """Set permission bits."""
        self._portal.run(transfer.chmod(self._core, path, mode, operation_id))

    def chown(
        self, path: str | bytes, uid: int, gid: int, *, operation_id: str | None = None
    ) -> None:
        """Set owner and group, as ids in the sandbox."""
        self._portal.run(transfer.chown(self._core, path, uid, gid, operation_id))

    # --- trees ------------------------------------------------------------------------

    def tar_down(self, path: str | bytes) -> Iterator[bytes]:
        """Iterate an uncompressed pax tar of the tree below `path`, names relative to it.

        The archive is hostile: unpack it with `download_tree`, not with a plain tar.
        """
        return self._portal.iterate(transfer.tar_down(self._core, path))

    def tar_up(
        self,
        path: str | bytes,
        content: Content,
        *,
        owner: Owner = None,
        operation_id: str | None = None,
    ) -> int:
        """Unpack an uncompressed tar below `path`; return the number of members.

        Args:
            path: made if missing.
            content: bytes, a file object, or an iterable of bytes.
            owner: of all members; None: the ids that the archive says.
        """
        return self._portal.run_with(
            partial(transfer.tar_up, self._core, path, owner=owner, operation_id=operation_id),
            content,
        )

    def download_tree(
        self,
        path: str | bytes,
        local: str | Path,
        *,
        max_bytes: int = 16 * GIB,
        on_refused: Callable[[str], None] | None = None,
    ) -> int:
        """Copy the tree below `path` into a local directory; return the number of members.

        The directory is made if missing and should be empty. Members belong to the caller and
        lose setuid, setgid and sticky bits.

        Args:
            on_refused: told, in a thread, of each member that must not be unpacked, and it is
                left out; None: the first of them refuses the tree.
        Raises:
            PathRefusedError: a member or link would leave `local`, or is a device or the like.
            FileTooLargeError: it is more than `max_bytes`, or than a million members.
        """
        return self._portal.run(
            transfer.download_tree(self._core, path, Path(local), max_bytes, on_refused)
        )

    def upload_tree(self, local: str | Path, path: str | bytes, *, owner: Owner = None) -> int:
        """Copy a local directory's content below `path`; return the number of members.

        Owner None: that of the directory `path`, which is made for the sandbox's default user
        if it is missing. Local links are copied as links, and holes stay holes. It is several
        changes, each of which is made once however often its connection is lost; for one under an
        id of your own take `tar_up`.
        """
        return self._portal.run(transfer.upload_tree(self._core, Path(local), path, owner))
