"""Carry declared artifacts out of the agent's sandbox, and into the verifier's.

An allow-list: what is not declared stays behind. What is declared is taken as an archive, read as
hostile, and only regular files, directories and links that stay inside of it go on; sizes and
counts are bounded. A thing that is refused is told, and the verifier judges without it: an agent
must not escape its grade by leaving a FIFO where its work belongs.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from coldframe.protocol.errors import (
    ColdframeError,
    FileError,
    PathNotFoundError,
    Side,
    StorageFullError,
)
from coldframe.protocol.models import GIB, FileKind, FileStat
from coldframe.rollouts.artifacts import CONVENTION
from coldframe.rollouts.artifacts import Artifact as Declared
from coldframe.rollouts.sift import NEVER, Sifted, copy, is_in
from coldframe.trajectories.recorder import Recorder, plain_text
from coldframe.trajectories.verification import Artifact, Artifacts, RefusedArtifact

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

MAX_BYTES = GIB
"""Of all archives of one verdict together, holes left out."""
MAX_ENTRIES = 100_000
"""In all of them together."""
TAKE_S = 120.0
"""For all of them together: an agent must not escape its grade by leaving a million files."""
LATE = f"not taken within {TAKE_S:g} s"
LISTED = 1000
"""Entries and refusals that stand in the trajectory itself."""


class ArtifactError(ColdframeError):
    """What a task declares as an artifact cannot be put where it belongs."""

    code = "artifact_not_placed"
    side = Side.VERIFIER


@dataclass(frozen=True)
class _Archive:
    declared: Declared
    path: Path
    directory: bool
    owner: tuple[int, int]
    mode: int


@dataclass
class Cargo:
    """What was taken for one verdict: archives in `spool`, and what is told of them."""

    spool: Path
    recorder: Recorder
    archives: list[_Archive] = field(default_factory=list)
    entries: list[Artifact] = field(default_factory=list)
    refused: list[RefusedArtifact] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    bytes: int = 0
    until: float = 0.0
    """On `time.monotonic()`: what is not taken then stays behind."""

    def refuse(self, path: str, reason: str) -> None:
        """Note what does not travel."""
        self.refused.append(RefusedArtifact(path=plain_text(path), reason=plain_text(reason)))

    def record(self) -> Artifacts:
        """Return what is told of it."""
        lines = b"".join(one.model_dump_json().encode() + b"\n" for one in self.entries)
        return Artifacts(
            entries=tuple(self.entries[:LISTED]),
            manifest=self.recorder.blob(lines),
            count=len(self.entries),
            bytes=self.bytes,
            refused=tuple(self.refused[:LISTED]),
            saved=tuple(self.saved),
        )

    async def take(self, sandbox: AsyncSandbox, artifacts: Sequence[Declared]) -> None:
        """Take every declared artifact that is there and fit to travel, within TAKE_S.

        Raises:
            SandboxGoneError, SpawnerLostError: the platform failed.
        """
        self.until = time.monotonic() + TAKE_S
        for declared in artifacts:
            try:
                await self._take(sandbox, declared)
            except FileError as error:
                self.refuse(declared.source, str(error))

    async def _take(self, sandbox: AsyncSandbox, declared: Declared) -> None:
        source = declared.source
        if source == "/" or is_in(source, NEVER):
            self.refuse(source, "no artifact is taken from there")
            return
        try:
            stat = await sandbox.files.stat(source, follow=False)
        except PathNotFoundError:
            if source != CONVENTION:
                self.refuse(source, "it is not there")
            return
        if stat.kind not in {FileKind.FILE, FileKind.DIRECTORY}:
            self.refuse(source, f"a {stat.kind}, neither a regular file nor a directory")
            return
        raw = self.spool / f"{len(self.archives)}.raw"
        out = raw.with_suffix(".tar")
        try:
            refused = await self._fetch(sandbox, source, raw)
            if refused is not None:
                self.refuse(source, refused)
                return
            await asyncio.to_thread(self._sift, declared, stat, raw, out)
        finally:
            raw.unlink(missing_ok=True)

    async def _fetch(self, sandbox: AsyncSandbox, source: str, raw: Path) -> str | None:
        """Write the archive as it comes, holes left out; return why it is refused."""
        left = MAX_BYTES - self.bytes
        with raw.open("wb") as file:
            async for piece in sandbox.files.tar_down(source):
                left -= len(piece)
                if left < 0:
                    return f"over {MAX_BYTES} bytes, with what was taken before it"
                if time.monotonic() > self.until:
                    return LATE
                await asyncio.to_thread(file.write, piece)
        return None

    def _sift(self, declared: Declared, stat: FileStat, raw: Path, out: Path) -> None:
        """Copy what may travel from one archive to another, member by member, as it stands."""
        sifted = Sifted(declared, stat.kind is FileKind.DIRECTORY, MAX_ENTRIES - len(self.entries))
        with raw.open("rb") as source, out.open("wb") as target:
            whole = sifted.run(source, target, self.until)
        if not whole:
            out.unlink()
            many = f"over {MAX_ENTRIES} entries, with what was taken before it"
            self.refuse(declared.source, LATE if time.monotonic() > self.until else many)
            return
        for path, reason in sifted.refused:
            self.refuse(path, reason)
        self.entries += sifted.entries
        self.bytes += out.stat().st_size
        self.archives.append(
            _Archive(declared, out, sifted.directory, (stat.uid, stat.gid), stat.mode & 0o1777)
        )

    async def place(self, sandbox: AsyncSandbox) -> None:
        """Unpack everything under its own path, in place of what the image has there.

        Each arrives whole or not at all: one that does not fit where it belongs, as it was left,
        is refused.

        Raises:
            ArtifactError: the verifier's image has something in the way.
        """
        for archive in self.archives:
            source = archive.declared.source
            try:
                await self._clear(sandbox, archive)
            except FileError as error:
                raise ArtifactError(f"artifact {source!r} cannot be placed: {error}") from error
            target = source if archive.directory else str(PurePosixPath(source).parent)
            try:
                with archive.path.open("rb") as content:
                    await sandbox.files.tar_up(target, content)
                continue
            except StorageFullError as error:
                if not self._fills(sandbox):
                    raise
                reason = f"the verifier's sandbox has no room for it: {error}"
            except FileError as error:
                reason = f"cannot be placed: {error}"
            self.refuse(source, reason)
            await self._clear(sandbox, archive)

    def _fills(self, sandbox: AsyncSandbox) -> bool:
        """Whether what was taken is so much that it fills the sandbox's own disk limit."""
        limit = sandbox.info.spec.disk_bytes
        return limit is not None and self.bytes > limit // 2

    async def _clear(self, sandbox: AsyncSandbox, archive: _Archive) -> None:
        """Make the place of an artifact: the directory itself, empty, or no file."""
        files, source = sandbox.files, archive.declared.source
        if archive.directory:
            await _clear(sandbox, source, archive.declared)
            await files.mkdir(source, mode=archive.mode, owner=archive.owner)
            await files.chown(source, *archive.owner)
            await files.chmod(source, archive.mode)
        elif await files.exists(source, follow=False):
            await files.remove(source, recursive=True)

    def save(self, directory: Path) -> None:
        """Keep the archives in the attempt's directory, each as `TARGET.tar`.

        They stay archives: what came out of a sandbox is not unpacked here unasked. One that
        holds a known secret is left out, and told.
        """
        for archive in self.archives:
            if not any(is_in(one.path, (archive.declared.source,)) for one in self.entries):
                continue
            name = f"{archive.declared.target}.tar"
            if _holds_secret(archive.path, self.recorder):
                self.refuse(archive.declared.source, "not saved: it holds a secret")
                continue
            try:
                _save(archive.path, directory / name)
            except OSError as error:
                self.refuse(archive.declared.source, f"not saved: {error.strerror}")
                continue
            self.saved.append(name)


def _save(archive: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open("rb") as source, path.open("wb") as target:
        copy(source, target, 0, archive.stat().st_size)
        target.flush()
        os.fsync(target.fileno())


def _holds_secret(path: Path, recorder: Recorder) -> bool:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return recorder.redactor.found_in(content)


async def _clear(sandbox: AsyncSandbox, top: str, declared: Declared) -> None:
    """Remove what the verifier's image has there, but for what the artifact leaves out."""
    if not await sandbox.files.exists(top, follow=False):
        return
    if not declared.exclude:
        await sandbox.files.remove(top, recursive=True)
        return

    async def below(directory: bytes, prefix: bytes) -> None:
        for entry in await sandbox.files.list(directory):
            name = prefix + entry.name
            path = directory + b"/" + entry.name
            if declared.excludes(os.fsdecode(name)):
                continue
            if entry.stat.kind is FileKind.DIRECTORY:
                await below(path, name + b"/")
                if not await sandbox.files.list(path):
                    await sandbox.files.remove(path)
            else:
                await sandbox.files.remove(path)

    if (await sandbox.files.stat(top, follow=False)).kind is FileKind.DIRECTORY:
        await below(os.fsencode(top), b"")
    else:
        await sandbox.files.remove(top)
