"""A sandbox's files, reached from outside: no program of the image takes part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.client import _transfer as transfer
from coldframe.client._arguments import typed_methods
from coldframe.client._content import AsyncContent
from coldframe.client._requests import check_codec
from coldframe.protocol.models import GIB, MIB, FileEntry, FileStat

if TYPE_CHECKING:
    from coldframe.client._inside import SandboxCore
    from coldframe.client._runner import AsyncRunner

Owner = tuple[int, int] | None


@typed_methods
class AsyncFiles:
    """Files of one sandbox. Paths are absolute in it, text or bytes; links stay inside it.

    Everything raises PathNotFoundError, PathRefusedError (devices, FIFOs, sockets, /proc and
    the like), PathExistsError, StorageFullError, SandboxGoneError, SandboxStateError, FileError.

    What changes something takes an `operation_id`: the same id again gives the first answer and
    changes nothing. It raises OperationMismatchError (the id stands for something else, or for
    other content), OperationExpiredError.
    """

    def __init__(self, core: SandboxCore, runner: AsyncRunner) -> None:
        self._core, self._runner = core, runner

    # --- contents ---------------------------------------------------------------------

    async def read(
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
        return await self._runner.run(transfer.read(self._core, path, offset, length, max_bytes))

    async def read_text(
        self, path: str | bytes, *, encoding: str = "utf-8", errors: str = "strict"
    ) -> str:
        """Return a file's content as text. Raises UnicodeDecodeError if it is not."""
        check_codec(encoding, errors)
        return (await self.read(path)).decode(encoding, errors)

    def iterate(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """Iterate a file's content in pieces of at most 1 MiB."""
        return self._runner.iterate(transfer.iterate(self._core, path, offset, length))

    async def write(
        self,
        path: str | bytes,
        content: AsyncContent,
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
        return await self._runner.run_with(
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

    async def download(self, path: str | bytes, local: str | Path) -> int:
        """Copy a file of the sandbox to a local one, atomically; return its size."""
        return await self._runner.run(transfer.download(self._core, path, Path(local)))

    async def upload(
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
        return await self._runner.run(
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

    async def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat:
        """Return what a path is; with `follow` false, of a link itself."""
        return await self._runner.run(transfer.stat(self._core, path, follow))

    async def exists(self, path: str | bytes, *, follow: bool = True) -> bool:
        """Whether there is such a path."""
        return await self._runner.run(transfer.exists(self._core, path, follow))

    async def list(self, path: str | bytes) -> tuple[FileEntry, ...]:
        """Return what is in a directory; names are bytes, and hostile."""
        return await self._runner.run(transfer.list_directory(self._core, path))

    async def mkdir(
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
        await self._runner.run(
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

    async def move(
        self, source: str | bytes, target: str | bytes, *, operation_id: str | None = None
    ) -> None:
        """Rename; an existing file at the target is replaced."""
        await self._runner.run(transfer.move(self._core, source, target, operation_id))

    async def remove(
        self, path: str | bytes, *, recursive: bool = False, operation_id: str | None = None
    ) -> None:
        """Remove a file or an empty directory, or with `recursive` whatever is there."""
        await self._runner.run(transfer.remove(self._core, path, recursive, operation_id))

    async def chmod(self, path: str | bytes, mode: int, *, operation_id: str | None = None) -> None:
        """Set permission bits."""
        await self._runner.run(transfer.chmod(self._core, path, mode, operation_id))

    async def chown(
        self, path: str | bytes, uid: int, gid: int, *, operation_id: str | None = None
    ) -> None:
        """Set owner and group, as ids in the sandbox."""
        await self._runner.run(transfer.chown(self._core, path, uid, gid, operation_id))

    # --- trees ------------------------------------------------------------------------

    def tar_down(self, path: str | bytes) -> AsyncIterator[bytes]:
        """Iterate an uncompressed pax tar of the tree below `path`, names relative to it.

        The archive is hostile: unpack it with `download_tree`, not with a plain tar.
        """
        return self._runner.iterate(transfer.tar_down(self._core, path))

    async def tar_up(
        self,
        path: str | bytes,
        content: AsyncContent,
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
        return await self._runner.run_with(
            partial(transfer.tar_up, self._core, path, owner=owner, operation_id=operation_id),
            content,
        )

    async def download_tree(
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
        return await self._runner.run(
            transfer.download_tree(self._core, path, Path(local), max_bytes, on_refused)
        )

    async def upload_tree(
        self, local: str | Path, path: str | bytes, *, owner: Owner = None
    ) -> int:
        """Copy a local directory's content below `path`; return the number of members.

        Owner None: that of the directory `path`, which is made for the sandbox's default user
        if it is missing. Local links are copied as links, and holes stay holes. It is several
        changes, each of which is made once however often its connection is lost; for one under an
        id of your own take `tar_up`.
        """
        return await self._runner.run(transfer.upload_tree(self._core, Path(local), path, owner))
