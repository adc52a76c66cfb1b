"""Build the layer of one COPY or ADD line on the host, without following a link on either side.

Sources come from a build context or an image; the target's links are resolved inside the image.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coldframe.host.treewalk import Entry, identity, open_file, walk
from coldframe.images.archives import decompressed, is_archive
from coldframe.images.digest import describe
from coldframe.images.ignore import Ignore
from coldframe.images.modes import changed
from coldframe.images.sources import Source
from coldframe.images.trees import remove_tree
from coldframe.images.unpack import copy_entry, entry_metadata, unpack_tar
from coldframe.images.view import MergedView, Place
from coldframe.images.writer import Metadata, TreeWriter, write_bytes
from coldframe.protocol.errors import ImageError
from coldframe.protocol.text import excerpt


@dataclass(frozen=True)
class Copy:
    """A COPY or ADD line with its variables filled in."""

    sources: tuple[str, ...]
    target: str
    """Absolute; a trailing slash says that it is a directory."""
    owner: tuple[int, int] | None = None
    """None: root, and of what is unpacked its own."""
    mode: str | None = None
    """Of --chmod, for every file and directory that is copied; None: their own."""
    files: tuple[tuple[str, bytes], ...] = ()
    """Names and contents of here-documents."""
    unpacks: bool = False
    """Whether archives are unpacked (ADD)."""
    excludes: tuple[str, ...] = ()
    """Patterns, as in a .dockerignore, of what stays behind: of paths below a source that is a
    directory, of the name of one that is a file."""
    parents: bool = False
    """Whether a source keeps the directories above it, those before a `/./` left out."""

    def chosen(self, source: Source) -> Iterator[tuple[str, str, str]]:
        """Yield each source as it was written, its path, and the directories that it keeps."""
        ignore = Ignore("\n".join(self.excludes))
        for text in self.sources:
            for path in source.expand(text):
                with source.entry(path) as entry:
                    is_directory = stat.S_ISDIR(entry.stat.st_mode)
                if not is_directory and ignore.leaves_out(posixpath.basename(path)) is not None:
                    continue
                yield text, path, self._kept(text, path, is_directory=is_directory)

    def _kept(self, text: str, path: str, *, is_directory: bool) -> str:
        if not self.parents:
            return ""
        before, pivot, _ = text.partition("/./")
        parts = path.split("/")
        dropped = len(posixpath.normpath(before).strip("/").split("/")) if pivot else 0
        dropped -= pivot != "" and posixpath.normpath(before) in (".", "/", "")
        return "/".join(parts[dropped:] if is_directory else parts[dropped:-1])

    def below(self, source: Source, path: str) -> Iterator[Entry]:
        """Walk a source that is a directory, without what stays behind."""
        ignore = Ignore("\n".join(self.excludes))
        for entry in source.walk(path):
            if ignore.leaves_out(os.fsdecode(entry.path)) is None:
                yield entry


def copy_digest(source: Source, request: Copy) -> str:
    """Return a digest of everything that decides what a copy writes but the image below it.

    Names, modes, kinds and contents count; times and owners do not. Raises ImageError, OSError.
    """
    whole = hashlib.sha256(b"coldframe-copy-1\n")
    target, owner, mode, files = request.target, request.owner, request.mode, request.files
    whole.update(repr((target, owner, mode, files, request.unpacks)).encode())
    if request.excludes or request.parents:
        whole.update(repr((request.excludes, request.parents)).encode())
    for text, path, _ in request.chosen(source):
        with source.entry(path) as entry:
            whole.update(repr((text, path)).encode())
            describe(whole, entry)
            is_directory = stat.S_ISDIR(entry.stat.st_mode)
        for below in request.below(source, path) if is_directory else ():
            describe(whole, below)
    return whole.hexdigest()


def copy_stamp(source: Source, request: Copy) -> str:
    """Return a digest that changes whenever a source is written to, without reading any."""
    whole = hashlib.sha256()
    for text in request.sources:
        for path in source.expand(text):
            with source.entry(path) as entry:
                _stamp(whole, entry)
                is_directory = stat.S_ISDIR(entry.stat.st_mode)
            for below in source.walk(path) if is_directory else ():
                _stamp(whole, below)
    return whole.hexdigest()


def _stamp(whole: hashlib._Hash, entry: Entry) -> None:
    status = entry.stat
    times = (status.st_mtime_ns, status.st_ctime_ns)
    whole.update(repr((entry.path, identity(status), status.st_size, times)).encode())


class LayerCopy:
    """Copies into a layer that lies on top of others."""

    def __init__(self, tree: Path, below: Sequence[Path]) -> None:
        # The tree under construction is the topmost layer of the view: what one source made
        # is there for the next.
        self._view = MergedView([tree, *below])
        self._below = MergedView(below) if below else None
        self._tree = tree
        self._entered: dict[bytes, Place] = {}

    def copy(self, source: Source, request: Copy) -> int:
        """Copy every source; return how many entries were written.

        Raises:
            ImageError: a source or the target is not what COPY can use; the message names it.
        """
        paths = [(path, kept) for _, path, kept in request.chosen(source)]
        target = os.fsencode(request.target)
        if len(paths) + len(request.files) > 1 and not target.endswith(b"/"):
            raise ImageError(f"several sources need a target that ends in / ({request.target})")
        self.inherit_root()
        with TreeWriter(self._tree) as writer:
            count = 0
            for path, kept in paths:
                place = target.rstrip(b"/") + b"/" + os.fsencode(kept) + b"/" if kept else target
                count += self._copy_one(source, path, place, request, writer)
            for name, content in request.files:
                self._write(os.fsencode(name), content, target, request, writer)
            return count + len(request.files)

    def make_directories(self, path: bytes, uid: int, gid: int) -> None:
        """Make a directory and the missing ones above it."""
        self.inherit_root()
        with TreeWriter(self._tree) as writer:
            self._enter(path, Metadata(0o755, uid, gid), writer)

    def inherit_root(self) -> None:
        """Give the layer's root what the root below has: overlay shows the topmost one's."""
        if self._below is not None and (status := self._below.resolve(b"").stat) is not None:
            with TreeWriter(self._tree) as writer:
                writer.directory(
                    b"", Metadata(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
                )

    def _copy_one(
        self, source: Source, path: str, target: bytes, request: Copy, writer: TreeWriter
    ) -> int:
        with source.entry(path) as entry:
            if not stat.S_ISDIR(entry.stat.st_mode):
                if request.unpacks and is_archive(entry):
                    return self._unpack(entry, path, target, request, writer)
                target = self._inside(os.fsencode(posixpath.basename(path)), target)
                self._put(entry, target, _metadata(entry, request), request, writer)
                return 1
        return self._copy_tree(request.below(source, path), target, request, writer)

    def _write(
        self, name: bytes, content: bytes, target: bytes, request: Copy, writer: TreeWriter
    ) -> None:
        uid, gid = request.owner or (0, 0)
        mode = 0o644 if request.mode is None else changed(0o644, request.mode)
        path = self._free(self._inside(name, target), request, writer)
        writer.file(path, Metadata(mode, uid, gid), write_bytes(content))

    def _inside(self, name: bytes, target: bytes) -> bytes:
        """Return where a file goes: into the target if that is a directory."""
        if target.endswith(b"/") or self._view.resolve(target).is_directory:
            return target.rstrip(b"/") + b"/" + name
        return target

    def _unpack(
        self, entry: Entry, path: str, target: bytes, request: Copy, writer: TreeWriter
    ) -> int:
        """Unpack beside the layer first: an archive is judged alone, then copied as a tree."""
        scratch = self._tree.with_name("unpacked")
        scratch.mkdir(mode=0o755)
        try:
            with (
                os.fdopen(open_file(entry), "rb", buffering=0) as file,
                decompressed(file, repr(path)) as stream,
            ):
                unpack_tar(stream, scratch, repr(path))
            entries = (one for one in walk(scratch) if one.path != b".")
            return self._copy_tree(entries, target, request, writer, own_ids=True)
        finally:
            remove_tree(scratch)

    def _copy_tree(
        self,
        entries: Iterable[Entry],
        target: bytes,
        request: Copy,
        writer: TreeWriter,
        *,
        own_ids: bool = False,
    ) -> int:
        """Copy a directory's content, not the directory itself, as Docker does."""
        count = 0
        uid, gid = request.owner or (0, 0)
        self._enter(target, Metadata(0o755, uid, gid), writer)
        linked: dict[tuple[int, int], bytes] = {}
        for entry in entries:
            mode = entry.stat.st_mode
            if stat.S_ISSOCK(mode):
                continue
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise ImageError(f"{excerpt(entry.path)} is a device; COPY takes none")
            path = target.rstrip(b"/") + b"/" + entry.path
            first = linked.get(identity(entry.stat))
            if first is not None:
                writer.hard_link(self._free(path, request, writer), first)
            else:
                metadata = _metadata(entry, request, own_ids=own_ids)
                put = self._put(entry, path, metadata, request, writer)
                if not stat.S_ISDIR(mode) and entry.stat.st_nlink > 1:
                    linked[identity(entry.stat)] = put
            count += 1
        return count

    def _put(
        self, entry: Entry, target: bytes, metadata: Metadata, request: Copy, writer: TreeWriter
    ) -> bytes:
        """Copy one entry, a directory without its content; return its path in the layer."""
        if stat.S_ISDIR(entry.stat.st_mode):
            return self._enter(target, metadata, writer).path
        path = self._free(target, request, writer)
        copy_entry(entry, writer, path, metadata)
        return path

    def _free(self, target: bytes, request: Copy, writer: TreeWriter) -> bytes:
        """Return the path in the layer of a file that is about to be made; parents are there."""
        uid, gid = request.owner or (0, 0)
        parent, _, name = target.rpartition(b"/")
        place = self._enter(parent, Metadata(0o755, uid, gid), writer)
        path = b"/".join((*place.parts, name))
        status, _ = self._view.look((*place.parts, name))
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise ImageError(f"'/{os.fsdecode(path)}' is a directory in the image")
        return path

    def _enter(self, path: bytes, metadata: Metadata, writer: TreeWriter) -> Place:
        """Make sure of a directory in the layer; one that the image has keeps its own metadata."""
        if (known := self._entered.get(path)) is not None:
            return known
        place = self._view.resolve(path)
        if place.stat is not None and not place.is_directory:
            raise ImageError(f"'/{os.fsdecode(place.path)}' is not a directory")
        status: os.stat_result | None = None
        for depth in range(1, len(place.parts) + 1):
            upto = place.parts[:depth]
            if depth == 1 or status is not None:  # below what is not there is nothing
                status, _ = self._view.look(upto)
            if status is not None:
                kept = Metadata(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
            elif upto == place.parts:
                kept = metadata
            else:
                kept = Metadata(0o755, metadata.uid, metadata.gid)
            writer.directory(b"/".join(upto), kept)
        self._entered[path] = place
        return place


def _metadata(entry: Entry, request: Copy, *, own_ids: bool = False) -> Metadata:
    own = entry_metadata(entry)
    if request.mode is not None:
        own = replace(own, mode=changed(entry.stat.st_mode, request.mode))
    if own_ids and request.owner is None:
        return own
    uid, gid = request.owner or (0, 0)
    return replace(own, uid=uid, gid=gid)
