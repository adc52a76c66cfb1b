"""Digests of what a verdict rests on, taken in a sandbox before the verifier and after it.

Read from outside by the file API: no program of the sandbox takes part. Hostile sizes are
bounded; what is too large to digest has a digest that says so, and equals itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, PathNotFoundError
from coldframe.protocol.models import MIB, FileKind, FileStat
from coldframe.rollouts.digests import IGNORED, file_sha256
from coldframe.trajectories.phases import TamperEvent
from coldframe.trajectories.recorder import plain_text

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

ABSENT = "absent"
MAX_ENTRIES = 10_000
MAX_BYTES = 1024 * MIB
"""Of one key input; and of all tests together, as `pack` has it."""
PROGRAM_CHANGED, USER_CHANGED = "program_changed", "user_changed"
"""Tamper events that void nothing by themselves."""
KEY_INPUTS_S = 60.0
LATE = "more than can be read in time"
LISTED = 20
"""Changes of one kind that are told one by one."""

PROGRAMS = (
    "/bin/sh",
    "/bin/bash",
    "/usr/bin/env",
    "/usr/bin/python3",
    "/usr/local/bin/sh",
    "/usr/local/bin/bash",
    "/usr/local/bin/env",
    "/usr/local/bin/python3",
    "/usr/local/sbin",
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/etc/ld.so.preload",
    "/etc/ld.so.cache",
)
"""What most verifiers run by. A change of them while the agent acted is told, not judged: it may
have upgraded its system."""


@dataclass
class Tampering:
    """Collects tamper events of one verdict."""

    step: str | None
    events: list[TamperEvent] = field(default_factory=list)

    def found(self, what: str, path: str, before: str, after: str, *, voided: bool) -> None:
        """Note that something is not what it was."""
        self.events.append(
            TamperEvent(
                at=time.time(),
                step=self.step,
                what=what,
                path=plain_text(path),
                before=before,
                after=after,
                voided=voided,
            )
        )

    def void(self, what: str) -> None:
        """Say of all events of a kind that there is no verdict for them."""
        self.events = [
            event.model_copy(update={"voided": event.voided or event.what == what})
            for event in self.events
        ]

    def compare(
        self, what: str, before: Mapping[str, str], after: Mapping[str, str], *, voided: bool
    ) -> list[str]:
        """Note every path that differs; return them."""
        changed = [path for path in sorted(before) if before[path] != after.get(path, ABSENT)]
        for path in changed[:LISTED]:
            self.found(what, path, before[path], after.get(path, ABSENT), voided=voided)
        if len(changed) > LISTED:
            more = f"{len(changed) - LISTED} more"
            self.found(what, more, "as brought", "changed", voided=voided)
        return changed


def expected(directories: Iterable[Path]) -> dict[str, str]:
    """Return path → digest of what uploading these directories, one over the other, makes."""
    found: dict[str, str] = {}
    for top in directories:
        for root, names, files in os.walk(top):
            names[:] = sorted(set(names) - IGNORED)
            for name in sorted({*names, *files} - IGNORED):
                path = Path(root) / name
                found[path.relative_to(top).as_posix()] = _local(path)
    return found


def _local(path: Path) -> str:
    if path.is_symlink():
        return _link(os.fsencode(path.readlink()))
    return "directory" if path.is_dir() else file_sha256(path)


def _link(target: bytes) -> str:
    return f"link:{hashlib.sha256(target).hexdigest()}"


def mapping_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of many by path."""
    lines = sorted(f"{len(path)}:{path} {digest}\n" for path, digest in digests.items())
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


async def present(sandbox: AsyncSandbox, top: str) -> dict[str, str]:
    """Return path → digest of everything below `top`, but for what does not count.

    Raises:
        FileError: it is no directory, or has more than MAX_ENTRIES entries.
    """
    digests: dict[str, str] = {}
    queue = [""]
    while queue:
        parent = queue.pop()
        for entry in await sandbox.files.list(f"{top}/{parent}" if parent else top):
            name = os.fsdecode(entry.name)
            if name in IGNORED:
                continue
            path = f"{parent}/{name}" if parent else name
            digests[path] = await _remote(sandbox, f"{top}/{path}", entry.stat)
            if len(digests) > MAX_ENTRIES:
                raise FileError(f"{top}: more than {MAX_ENTRIES} entries")
            if entry.stat.kind is FileKind.DIRECTORY:
                queue.append(path)
    return digests


async def found_again(sandbox: AsyncSandbox, top: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return what lies below `top` under the wanted paths; other paths are not looked at."""
    digests: dict[str, str] = {}
    below: dict[str, set[str]] = {}
    for path in wanted:
        parent, _, name = path.rpartition("/")
        below.setdefault(parent, set()).add(name)
    for parent in sorted(below):
        if parent and digests.get(parent) != "directory":
            continue
        where = f"{top}/{parent}" if parent else top
        try:
            if (await sandbox.files.stat(where, follow=False)).kind is not FileKind.DIRECTORY:
                continue
            entries = await sandbox.files.list(where)
        except FileError:
            continue
        for entry in entries:
            name = os.fsdecode(entry.name)
            if name in below[parent]:
                path = f"{parent}/{name}" if parent else name
                digests[path] = await _remote(sandbox, f"{top}/{path}", entry.stat)
    return digests


async def _remote(sandbox: AsyncSandbox, path: str, stat: FileStat) -> str:
    if stat.kind is FileKind.LINK:
        return _link(stat.target or b"")
    if stat.kind is not FileKind.FILE:
        return stat.kind.value
    if stat.size > MAX_BYTES:
        return f"file of {stat.size} bytes changed at {stat.ctime_ns}"
    digest = hashlib.sha256()
    try:
        async for piece in sandbox.files.iterate(path, length=MAX_BYTES):
            digest.update(piece)
    except FileError:
        return "unreadable"
    return digest.hexdigest()


async def key_inputs(sandbox: AsyncSandbox, paths: Iterable[str]) -> dict[str, str]:
    """Return path → digest of declared inputs: files, links, or whole trees.

    An agent may have left so much there that it takes for ever to read: what is not read within
    KEY_INPUTS_S, all together, is LATE.
    """
    found = dict.fromkeys(paths, LATE)
    with suppress(TimeoutError):
        async with asyncio.timeout(KEY_INPUTS_S):
            for path in found:
                found[path] = await _tree(sandbox, path)
    return found


async def _tree(sandbox: AsyncSandbox, top: str) -> str:
    try:
        return await _whole_tree(sandbox, top)
    except PathNotFoundError:
        return ABSENT
    except FileError as error:
        return f"unreadable: {error.code}"


async def _whole_tree(sandbox: AsyncSandbox, top: str) -> str:
    stat = await sandbox.files.stat(top, follow=False)
    if stat.kind is not FileKind.DIRECTORY:
        return f"{stat.mode:o}:{await _remote(sandbox, top, stat)}"
    digest, entries = hashlib.sha256(), 0
    queue = [os.fsencode(top)]
    while queue:
        directory = queue.pop()
        for entry in await sandbox.files.list(directory):
            entries += 1
            if entries > MAX_ENTRIES:
                return f"more than {MAX_ENTRIES} entries"
            path = directory + b"/" + entry.name
            if entry.stat.kind is FileKind.DIRECTORY:
                queue.append(path)
            one = await _remote(sandbox, os.fsdecode(path), entry.stat)
            digest.update(b"%d:%s %o %s\n" % (len(path), path, entry.stat.mode, one.encode()))
    return f"tree:{digest.hexdigest()}"


async def programs(sandbox: AsyncSandbox) -> dict[str, str]:
    """Return path → digest of what it leads to; of a directory, of the names in it.

    By content: times of a layer's files change when another image comes to share them.
    """
    found = {}
    for path in PROGRAMS:
        try:
            stat = await sandbox.files.stat(path)
            if stat.kind is FileKind.DIRECTORY:
                names = sorted(entry.name for entry in await sandbox.files.list(path))
                found[path] = f"names:{hashlib.sha256(b'/'.join(names)).hexdigest()}"
            else:
                found[path] = await _remote(sandbox, path, stat)
        except FileError:
            found[path] = ABSENT
    return found
