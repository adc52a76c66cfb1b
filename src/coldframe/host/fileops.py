"""What can be done to files below a sandbox's root: short, synchronous jobs for file threads.

Callers run them under the ids that new entries shall have. They raise typed errors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass

from coldframe.host.roottree import (
    RootTree,
    closing,
    fd_path,
    reopen,
    require_regular,
    typed,
    typed_errors,
)
from coldframe.protocol.errors import (
    ColdframeError,
    FileTooLargeError,
    InvalidRequestError,
    PathExistsError,
    PathNotFoundError,
    PathRefusedError,
)
from coldframe.protocol.models import FileEntry, FileKind, FileStat
from coldframe.protocol.text import excerpt

PIECE_BYTES = 1 << 20
LIST_LIMIT = 100_000
TEMPORARY_PREFIX = b".coldframe-"
_KINDS = {
    stat.S_IFREG: FileKind.FILE,
    stat.S_IFDIR: FileKind.DIRECTORY,
    stat.S_IFLNK: FileKind.LINK,
    stat.S_IFIFO: FileKind.FIFO,
    stat.S_IFSOCK: FileKind.SOCKET,
}


def kind_of(mode: int) -> FileKind:
    """Return what a mode is of; what has no kind of its own is a device."""
    return _KINDS.get(stat.S_IFMT(mode), FileKind.DEVICE)


def describe(tree: RootTree, status: os.stat_result, target: bytes | None = None) -> FileStat:
    """Return the metadata in the sandbox's own ids."""
    return FileStat.model_construct(
        kind=kind_of(status.st_mode),
        mode=stat.S_IMODE(status.st_mode),
        uid=tree.own_id(status.st_uid),
        gid=tree.own_id(status.st_gid),
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        nlink=status.st_nlink,
        blocks=status.st_blocks,
        target=target,
    )


def stat_path(tree: RootTree, path: bytes, follow: bool) -> FileStat:
    """Return metadata; of the link itself when `follow` is false."""
    flags = os.O_PATH if follow else os.O_PATH | os.O_NOFOLLOW
    with typed_errors(path), closing(tree.open(path, flags)) as handle:
        status = os.fstat(handle)
        is_link = stat.S_ISLNK(status.st_mode)
        return describe(tree, status, os.readlink(b"", dir_fd=handle) if is_link else None)


def list_directory(tree: RootTree, path: bytes) -> tuple[FileEntry, ...]:
    """Return what is in a directory, by name.

    Raises FileTooLargeError for more than LIST_LIMIT entries.
    """
    entries: list[FileEntry] = []
    with (
        typed_errors(path),
        closing(tree.open(path, os.O_PATH | os.O_DIRECTORY)) as handle,
        closing(reopen(handle, os.O_RDONLY | os.O_DIRECTORY)) as fd,
        os.scandir(fd) as names,
    ):
        for entry in names:
            if len(entries) >= LIST_LIMIT:
                raise FileTooLargeError(
                    f"{excerpt(path)} has more than {LIST_LIMIT} entries; use exec"
                )
            name = os.fsencode(entry.name)
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found = _describe_entry(tree, handle, name)
                entries.append(FileEntry.model_construct(name=name, stat=found))
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _describe_entry(tree: RootTree, directory: int, name: bytes) -> FileStat:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        return describe(tree, status)
    try:
        return describe(tree, status, os.readlink(name, dir_fd=directory))
    except OSError as error:
        if error.errno == errno.EINVAL:  # something else took the name meanwhile
            raise FileNotFoundError(errno.ENOENT, "replaced", name) from error
        raise


def open_file(tree: RootTree, path: bytes) -> int:
    """Open a regular file for reading."""
    with typed_errors(path):
        return tree.open_regular(path)


def read_piece(fd: int, path: bytes, offset: int, size: int) -> bytes:
    """Read at most PIECE_BYTES at an offset."""
    with typed_errors(path):
        return os.pread(fd, min(size, PIECE_BYTES), offset)


# --- writing --------------------------------------------------------------------------


@dataclass
class PendingFile:
    """A file under a temporary name, on its way to its own."""

    directory: int
    """O_PATH descriptor of where it will be."""
    name: bytes
    temporary: bytes
    fd: int
    path: bytes

    def append(self, data: bytes) -> None:
        """Write all of `data` at the end."""
        with typed_errors(self.path):
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]

    def commit(self) -> None:
        """Put the file in its place at once, over what was there."""
        with typed_errors(self.path):
            os.rename(
                self.temporary, self.name, src_dir_fd=self.directory, dst_dir_fd=self.directory
            )
            self.temporary = b""

    def close(self) -> None:
        """Give everything back; without a commit nothing is left in the tree."""
        if self.temporary:
            with contextlib.suppress(OSError):  # the sandbox may have taken it away itself
                os.unlink(self.temporary, dir_fd=self.directory)
            self.temporary = b""
        for fd in (self.fd, self.directory):
            os.close(fd)


def begin_write(
    tree: RootTree, path: bytes, mode: int, owner: tuple[int, int], parents: bool
) -> PendingFile:
    """Make the temporary file; what exists keeps its mode and owner.

    Call under `owner`'s host ids, which a new file and new parents then have.
    """
    check_mode(mode)
    with typed_errors(path):
        if parents:
            _make_parents(tree, path)
        directory, name = tree.parent_of_target(path)
        fd = -1
        temporary = temporary_name()
        try:
            existing = _existing_file(directory, name, path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600, dir_fd=directory)
            uid, gid = owner if existing is None else (existing.st_uid, existing.st_gid)
            os.fchown(fd, uid, gid)
            os.fchmod(fd, mode if existing is None else stat.S_IMODE(existing.st_mode))
        except BaseException:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                os.close(fd)
            os.close(directory)
            raise
        return PendingFile(directory, name, temporary, fd, path)


def exchange(
    tree: RootTree, path: bytes, data: bytes, owner: tuple[int, int], most: int
) -> bytes | None:
    """Write a small file whole, in one go, and return what it held; None: there was none.

    Of a longer one, `most` bytes are returned. One that holds `data` already is left as it is.
    """
    before: bytes | None = None
    with contextlib.suppress(PathNotFoundError):
        fd = open_file(tree, path)
        try:
            before = read_piece(fd, path, 0, max(most, len(data) + 1))
        finally:
            os.close(fd)
    if before != data:
        pending = begin_write(tree, path, 0o644, owner, True)
        try:
            pending.append(data)
            pending.commit()
        finally:
            pending.close()
    return None if before is None else before[:most]


def temporary_name() -> bytes:
    """A name that nothing in the sandbox can know beforehand."""
    return TEMPORARY_PREFIX + secrets.token_hex(8).encode()


def check_mode(mode: int) -> None:
    """Refuse what are not permission bits."""
    if not 0 <= mode <= 0o7777:
        raise InvalidRequestError(f"mode {mode:#o} is not in 0..0o7777")


def _existing_file(directory: int, name: bytes, path: bytes) -> os.stat_result | None:
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    require_regular(status, path)
    return status


def _make_parents(tree: RootTree, path: bytes) -> None:
    parent = path.rstrip(b"/").rpartition(b"/")[0]
    if parent:
        make_directory(tree, parent, 0o755, parents=True, exist_ok=True)


def make_directory(
    tree: RootTree, path: bytes, mode: int, *, parents: bool, exist_ok: bool
) -> None:
    """Make a directory for the current ids; missing parents get mode 0755."""
    check_mode(mode)
    with typed_errors(path):
        if _is_directory(tree, path):
            if not exist_ok:
                raise PathExistsError(f"{excerpt(path)} exists")
            return
        prefix = b""
        names = [name for name in path.split(b"/") if name]
        for at, name in enumerate(names):
            prefix += b"/" + name
            last = at == len(names) - 1
            if (parents or last) and not _is_directory(tree, prefix):
                _make_one(tree, prefix, mode if last else 0o755)


def _is_directory(tree: RootTree, path: bytes) -> bool:
    """Whether a directory is there; raises FileExistsError for anything else."""
    try:
        with closing(tree.open(path)) as handle:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                return True
    except FileNotFoundError:
        return False
    except NotADirectoryError:  # something on the way there
        pass
    raise FileExistsError(errno.EEXIST, "not a directory", path)


def _make_one(tree: RootTree, path: bytes, mode: int) -> None:
    directory, name = tree.parent(path)
    with closing(directory):
        try:
            os.mkdir(name, mode & 0o1777, dir_fd=directory)
        except FileExistsError:
            if not _is_directory(tree, path):  # a dangling link, or a race
                raise
            return
        if mode & 0o6000:
            flags = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
            with closing(os.open(name, flags, dir_fd=directory)) as made:
                fd_path(made).chmod(mode)


# --- changing -------------------------------------------------------------------------


def change_mode(tree: RootTree, path: bytes, mode: int) -> None:
    """Set permission bits, of what a link leads to."""
    check_mode(mode)
    with typed_errors(path), closing(tree.open(path)) as handle:
        fd_path(handle).chmod(mode)


def change_owner(tree: RootTree, path: bytes, uid: int, gid: int) -> None:
    """Set the owner, in the sandbox's ids, of what a link leads to."""
    host_ids = tree.host_id(uid), tree.host_id(gid)
    with typed_errors(path), closing(tree.open(path)) as handle:
        os.chown(fd_path(handle), *host_ids)


def move(tree: RootTree, source: bytes, target: bytes) -> None:
    """Rename, over a file or an empty directory that is there.

    Raises OSError(EXDEV) when the kernel cannot: a directory of the image.
    """
    with typed_errors(source):
        source_dir, source_name = tree.parent(source)
    with closing(source_dir):
        with typed_errors(target):
            target_dir, target_name = tree.parent(target)
        with closing(target_dir):
            try:
                os.rename(source_name, target_name, src_dir_fd=source_dir, dst_dir_fd=target_dir)
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise
                raise _move_error(error, source, target) from error


def _move_error(error: OSError, source: bytes, target: bytes) -> ColdframeError:
    if error.errno == errno.EINVAL:
        return PathRefusedError(f"{excerpt(source)} cannot move below itself")
    return typed(error, source if error.errno == errno.ENOENT else target)
