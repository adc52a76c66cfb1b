"""Unpack an archive that nobody vouches for below one directory of a sandbox.

Every name is resolved beneath the target by the kernel; what would leave it, by an absolute
name, by `..` or through a link, ends the unpacking. Memory is bounded whatever the headers say.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable

from coldframe.host import syscalls
from coldframe.host.fileops import make_directory, temporary_name
from coldframe.host.roottree import RootTree, closing, fd_path, typed, typed_errors
from coldframe.protocol.errors import FileError, PathRefusedError
from coldframe.protocol.sparse_maps import DamagedArchiveError
from coldframe.protocol.tar import TarReader
from coldframe.protocol.text import excerpt

_DIRECTORY_TIMES_LIMIT = 100_000
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(
    tree: RootTree,
    path: bytes,
    read: Callable[[int], bytes],
    owner: tuple[int, int] | None,
    become: Callable[[int, int], None],
) -> int:
    """Unpack what `read` gives and return the number of members.

    `owner` (the sandbox's ids) overrides those in the archive; `become` gives the thread the
    host ids that new entries shall have. Blocks in `read`.

    Raises typed file errors; FileError for what is no archive.
    """
    try:
        with typed_errors(path):
            make_directory(tree, path, 0o755, parents=True, exist_ok=True)
            with closing(tree.open(path, os.O_PATH | os.O_DIRECTORY)) as target:
                return _Unpacking(tree, target, owner, become).run(TarReader(read))
    except DamagedArchiveError as error:
        raise FileError(f"{excerpt(path)}: not a valid archive: {error}") from error


class _Unpacking:
    def __init__(
        self,
        tree: RootTree,
        target: int,
        owner: tuple[int, int] | None,
        become: Callable[[int, int], None],
    ) -> None:
        self._tree, self._target = tree, target
        self._owner, self._become = owner, become
        self._directory_times: list[tuple[bytes, float]] = []

    def run(self, reader: TarReader) -> int:
        """Unpack all members and return their number."""
        count = 0
        for member in reader:
            self._member(reader, member)
            count += 1
        for name, mtime in self._directory_times:
            with contextlib.suppress(OSError):  # replaced meanwhile by the sandbox
                self._set_time(name, mtime)
        return count

    def _member(self, reader: TarReader, member: tarfile.TarInfo) -> None:
        name = _relative(member.name)
        uid, gid = self._owner or (member.uid, member.gid)
        self._become(self._tree.host_id(uid), self._tree.host_id(gid))
        try:
            if member.isdir():
                self._directory(name, member)
            elif member.isreg():
                self._file(reader, name, member)
            elif member.issym():
                self._symbolic_link(name, member)
            elif member.islnk():
                self._hard_link(name, member)
            else:
                raise PathRefusedError(f"member {excerpt(member.name)} is a device or a FIFO")
        except OSError as error:
            if error.errno == errno.EXDEV:
                message = f"member {excerpt(member.name)} would leave the target directory"
                raise PathRefusedError(message) from error
            raise typed(error, os.fsencode(member.name)) from error

    def _parent(self, name: bytes) -> tuple[int, bytes]:
        """Open the directory of a member beneath the target, made if missing."""
        directory, _, last = name.rpartition(b"/")
        if not last:
            raise PathRefusedError("a member that is no directory has no name")
        try:
            return self._open(directory, os.O_PATH | os.O_DIRECTORY), last
        except FileNotFoundError:
            self._make_directories(directory)
            return self._open(directory, os.O_PATH | os.O_DIRECTORY), last

    def _open(self, name: bytes, flags: int) -> int:
        for _ in range(64):
            try:
                return syscalls.openat2(self._target, name or b".", flags, resolve=_BENEATH)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
        raise OSError(errno.EAGAIN, "the path kept changing", name)

    def _make_directories(self, name: bytes) -> None:
        prefix = b""
        for part in name.split(b"/"):
            parent = self._open(prefix, os.O_PATH | os.O_DIRECTORY)
            with closing(parent), contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=parent)
            prefix = prefix + b"/" + part if prefix else part

    def _directory(self, name: bytes, member: tarfile.TarInfo) -> None:
        mode = member.mode & 0o7777
        if name:
            parent, last = self._parent(name)
            with closing(parent):
                if not _is_directory(parent, last):
                    _clear(parent, last)
                    os.mkdir(last, mode & 0o1777, dir_fd=parent)
                flags = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
                with closing(os.open(last, flags, dir_fd=parent)) as made:
                    self._own(made, member)
                    fd_path(made).chmod(mode)
        if len(self._directory_times) < _DIRECTORY_TIMES_LIMIT:
            self._directory_times.append((name, member.mtime))

    def _file(self, reader: TarReader, name: bytes, member: tarfile.TarInfo) -> None:
        parent, last = self._parent(name)
        with closing(parent):
            temporary = temporary_name()
            fd = os.open(temporary, _NEW_FILE, 0o600, dir_fd=parent)
            try:
                with closing(fd):
                    reader.write(member, fd)
                    self._own(fd, member)
                    os.fchmod(fd, member.mode & 0o7777)
                    os.utime(fd, (member.mtime, member.mtime))
                os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise

    def _symbolic_link(self, name: bytes, member: tarfile.TarInfo) -> None:
        parent, last = self._parent(name)
        with closing(parent):
            _clear(parent, last)
            os.symlink(os.fsencode(member.linkname), last, dir_fd=parent)

    def _hard_link(self, name: bytes, member: tarfile.TarInfo) -> None:
        source_parent, source = self._parent(_relative(member.linkname))
        with closing(source_parent):
            parent, last = self._parent(name)
            with closing(parent):
                _require_linkable(source_parent, source, member)
                if source != last or not os.path.sameopenfile(source_parent, parent):
                    _clear(parent, last)
                    os.link(
                        source,
                        last,
                        src_dir_fd=source_parent,
                        dst_dir_fd=parent,
                        follow_symlinks=False,
                    )

    def _own(self, fd: int, member: tarfile.TarInfo) -> None:
        uid, gid = self._owner or (member.uid, member.gid)
        host = self._tree.host_id(uid), self._tree.host_id(gid)
        status = os.fstat(fd)
        if (status.st_uid, status.st_gid) != host:
            os.chown(fd_path(fd), *host)

    def _set_time(self, name: bytes, mtime: float) -> None:
        with closing(self._open(name, os.O_PATH | os.O_DIRECTORY)) as handle:
            os.utime(fd_path(handle), (mtime, mtime))


def _relative(name: str) -> bytes:
    """Return a member's name without `.` parts; refuse one that says it leaves."""
    raw = os.fsencode(name)
    parts = [part for part in raw.split(b"/") if part not in {b"", b"."}]
    if raw.startswith(b"/") or b".." in parts or b"\0" in raw:
        raise PathRefusedError(f"member {excerpt(name)} would leave the target directory")
    return b"/".join(parts)


def _is_directory(parent: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _clear(parent: int, name: bytes) -> None:
    """Remove what a member is to replace; a directory stays and is an error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _require_linkable(parent: int, name: bytes, member: tarfile.TarInfo) -> None:
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise PathRefusedError(f"member {excerpt(member.name)} links to what is no file")
