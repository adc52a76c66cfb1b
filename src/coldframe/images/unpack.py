"""Import root file systems: tar archives (plain, gzip, bzip2, xz, zstd) and directories.

What is imported is not trusted. Entries never leave the tree, nothing is reached through a
link, device nodes under dev/ are left out and refused elsewhere, and an archive that is cut
short or damaged in the middle is refused rather than half kept.
"""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldframe.host.treewalk import Entry, identity, open_file, walk
from coldframe.images import names
from coldframe.images.archives import Readable, open_archive
from coldframe.images.base import Image, ImageConfig, Progress, quiet
from coldframe.images.digest import MAX_FILE, check_count, layer_xattrs
from coldframe.images.store import ImageStore
from coldframe.images.trees import NO_SPACE
from coldframe.images.writer import Metadata, TreeWriter, copy_content, split
from coldframe.protocol.errors import ImageError
from coldframe.protocol.sparse_maps import DamagedArchiveError
from coldframe.protocol.tar import TarReader
from coldframe.protocol.text import excerpt

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_CONFIG = ImageConfig(env=(("PATH", PATH),))
_XATTR = "SCHILY.xattr."
_REPORT_EVERY = 5000


def import_image(
    store: ImageStore,
    name: str,
    source: Path,
    *,
    config: ImageConfig = DEFAULT_CONFIG,
    progress: Progress = quiet,
) -> Image:
    """Import an archive or a directory as a one-layer image and give it a name.

    Raises:
        ImageError: it cannot be read, or holds what no image may hold; nothing is kept.
        InvalidRequestError: not a name.
        StorageFullError: no space is left.
    """
    name = names.normalise(name)
    with store.workspace() as work:
        tree = work / "tree"
        tree.mkdir(mode=0o755)
        if source.is_dir():
            unpack_directory(source, tree, progress)
        else:
            with open_archive(source) as stream:
                unpack_tar(stream, tree, str(source), progress)
        progress("taking digests")
        layer = store.add_layer(tree)
    return store.tag(name, [layer], config)


def unpack_tar(stream: Readable, tree: Path, shown: str, progress: Progress = quiet) -> None:
    """Unpack a plain tar stream into an empty directory, in one pass.

    `shown` names the archive in messages. Raises as `import_image` does.
    """
    try:
        with TreeWriter(tree) as writer:
            reader = TarReader(stream.read)
            count = 0
            for info in reader:
                with _member_named(info.name):
                    _unpack_member(reader, info, writer)
                count += 1
                check_count(count)
                if count % _REPORT_EVERY == 0:
                    progress(f"unpacked {count} entries")
            progress(f"unpacked {count} entries")
    except (ImageError, DamagedArchiveError) as error:
        raise ImageError(f"{shown}: {error}") from error
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system; gzip and bzip2 complain without a number
        raise ImageError(f"{shown}: not a tar archive, or damaged ({error})") from error


@contextmanager
def _member_named(name: str) -> Iterator[None]:
    """Say which entry an error of the system is about."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        raise ImageError(f"{excerpt(name)}: {error.strerror or error}") from error


def _unpack_member(reader: TarReader, info: tarfile.TarInfo, writer: TreeWriter) -> None:
    path = _raw(info.name)
    metadata = Metadata(
        mode=info.mode & 0o7777,
        uid=info.uid,
        gid=info.gid,
        mtime_ns=max(0, int(info.mtime)) * 10**9,
        xattrs=dict(_carried_xattrs(info)),
    )
    if info.isdir():
        writer.directory(path, metadata)
    elif info.issym():
        writer.link(path, _raw(info.linkname), metadata)
    elif info.islnk():
        writer.hard_link(path, _raw(info.linkname))
    elif info.isfifo():
        writer.fifo(path, metadata)
    elif info.ischr() or info.isblk():
        refuse_device(path)
    elif info.isreg():
        if info.size > MAX_FILE:
            raise ImageError(
                f"{excerpt(info.name)} has {info.size} bytes; at most {MAX_FILE} are kept"
            )
        writer.file(path, metadata, lambda fd: reader.write(info, fd))
    else:
        raise ImageError(f"{excerpt(info.name)} is of the unknown kind {info.type!r}")


def refuse_device(path: bytes) -> None:
    """Pass over a device node under dev/ (a sandbox brings its own /dev).

    Raises:
        ImageError: it lies anywhere else.
    """
    parts = split(path)
    if parts[:1] != (b"dev",):
        raise ImageError(f"{excerpt(path)} is a device; only those under dev/ are left out")


def _carried_xattrs(info: tarfile.TarInfo) -> Iterator[tuple[str, bytes]]:
    if not (info.isreg() or info.isdir()):
        return
    for key, value in info.pax_headers.items():
        name = key.removeprefix(_XATTR)
        if name != key and may_import_xattr(name):
            if "\0" in name:
                raise ImageError(f"{excerpt(info.name)} has an attribute whose name holds a NUL")
            yield name, _raw(value)


def may_import_xattr(name: str) -> bool:
    """Whether an import keeps an attribute; overlay's own would change what a layer means."""
    return name == "security.capability" or (
        name.startswith("user.") and not name.startswith("user.overlay.")
    )


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# --- directories ----------------------------------------------------------------------------


def unpack_directory(source: Path, tree: Path, progress: Progress = quiet) -> None:
    """Copy a directory's tree into an empty directory. Raises as `import_image` does.

    Sockets are left out. Links are copied as links.
    """
    linked: dict[tuple[int, int], bytes] = {}
    with TreeWriter(tree) as writer:
        for count, entry in enumerate(walk(source), start=1):
            with _member_named(os.fsdecode(entry.path)):
                _copy_entry(entry, writer, linked)
            if count % _REPORT_EVERY == 0:
                progress(f"copied {count} entries")


def _copy_entry(entry: Entry, writer: TreeWriter, linked: dict[tuple[int, int], bytes]) -> None:
    mode = entry.stat.st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        refuse_device(entry.path)
        return
    if stat.S_ISSOCK(mode):
        return
    if not stat.S_ISDIR(mode) and entry.stat.st_nlink > 1:
        first = linked.setdefault(identity(entry.stat), entry.path)
        if first != entry.path:
            writer.hard_link(entry.path, first)
            return
    copy_entry(entry, writer, entry.path, entry_metadata(entry))


def entry_metadata(entry: Entry) -> Metadata:
    """Return an entry's own metadata, with the attributes that an import keeps."""
    status = entry.stat
    plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    xattrs = {
        name: value for name, value in layer_xattrs(entry) if plain and may_import_xattr(name)
    }
    mode = stat.S_IMODE(status.st_mode)
    return Metadata(mode, status.st_uid, status.st_gid, status.st_mtime_ns, xattrs)


def copy_entry(entry: Entry, writer: TreeWriter, path: bytes, metadata: Metadata) -> None:
    """Copy one entry of a walk to `path` of another tree; a directory without its content."""
    mode = entry.stat.st_mode
    if stat.S_ISDIR(mode):
        writer.directory(path, metadata)
    elif stat.S_ISLNK(mode):
        writer.link(path, os.readlink(entry.name, dir_fd=entry.parent), metadata)
    elif stat.S_ISFIFO(mode):
        writer.fifo(path, metadata)
    else:
        source = open_file(entry)
        try:
            writer.file(path, metadata, lambda fd: copy_content(source, fd))
        finally:
            os.close(source)
