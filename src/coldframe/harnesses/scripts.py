"""Carry a directory of scripts into a sandbox and say how one of them is run.

Shared by whoever uploads what came with a task: the reference solution and the tests. Modes
are normalised, so that a checkout under a strict umask works in the sandbox too.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, TaskError
from coldframe.protocol.models import FileKind

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

MAX_UPLOAD_BYTES = 1 << 30


async def shell_of(sandbox: AsyncSandbox) -> str:
    """Return bash where the image has it, else its sh: tasks are written for bash."""
    try:
        found = await sandbox.files.stat("/bin/bash")
    except FileError:
        return "/bin/sh"
    return "/bin/bash" if found.kind is FileKind.FILE and found.mode & 0o111 else "/bin/sh"


async def run_argv(sandbox: AsyncSandbox, script: Path, target: str) -> tuple[str, ...]:
    """Return the command that runs `script` at `target`: itself, or by a shell without a `#!`."""
    with script.open("rb") as file:
        if file.read(2) == b"#!":
            return (target,)
    return (await shell_of(sandbox), target)


def _normalise(member: tarfile.TarInfo) -> tarfile.TarInfo:
    executable = member.isdir() or bool(member.mode & 0o111)
    member.mode = 0o755 if executable or member.name.endswith(".sh") else 0o644
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def pack(directory: Path) -> bytes:
    """Return a tar of the tree below `directory`, names relative, owned by root.

    Raises:
        TaskError: something in it is no file, directory or link, or it is over 1 GiB.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for root, names, files in os.walk(directory):
            names.sort()
            for name in sorted([*names, *files]):
                path = Path(root) / name
                if not (path.is_symlink() or path.is_dir() or path.is_file()):
                    raise TaskError(f"{path}: not a file, directory or link")
                relative = str(path.relative_to(directory))
                archive.add(path, relative, recursive=False, filter=_normalise)
                if buffer.tell() > MAX_UPLOAD_BYTES:
                    raise TaskError(f"{directory}: more than {MAX_UPLOAD_BYTES} bytes to upload")
    return buffer.getvalue()
