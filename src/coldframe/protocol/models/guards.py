"""Guarded directories: what one command alone may write."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coldframe.protocol.models.base import MIB, Model
from coldframe.protocol.models.files import FileKind

_Id = Annotated[int, Field(ge=0, le=65535)]


class GuardRequest(Model):
    """A directory that one command alone may write, and only by what nobody planted."""

    path: str
    """An existing directory; what lies there is out of sight meanwhile."""
    operation_id: str
    """Of the command; it is started after this."""
    names: tuple[str, ...]
    """Files in it that are vouched for."""
    owner: tuple[_Id, _Id] = (0, 0)
    size_bytes: int = Field(default=64 * MIB, ge=4096, le=1 << 40)
    trusted: tuple[str, ...] = ()
    """Paths whose files may be run as code by what writes the named files, whoever made them."""


class GuardedFile(Model):
    """One of the named files, as it was when writing ended."""

    name: str
    kind: FileKind
    size: int
    nlink: int
    vouched: bool
    """It was written, and by no process that is not the command's, or that had run foreign code."""
    content: bytes
    """Of a regular file, at most 64 KiB and one byte."""


class GuardRefusal(Model):
    """An attempt to write that failed. Texts are hostile."""

    at: float
    program: str
    name: str
    outsider: bool
    """It was not of the command."""
    cause: str
    """The foreign file that it had run as code; empty for an outsider."""


class GuardReport(Model):
    """What was written, by whom it was tried, and whether foreign files were used at all."""

    files: tuple[GuardedFile, ...]
    displaced: tuple[str, ...]
    """Names under which a file was that could be vouched for, and another or none is now, or it was
    changed by what is not of the command."""
    refused: tuple[GuardRefusal, ...]
    touched: str | None
    """The first foreign file that a process of the command opened."""
    alone: bool
    """Nothing else lived in the sandbox when the directory was guarded."""
    lost: bool
    """Not all that was opened could be judged, so nothing is vouched for and no file is listed."""
    cpu_s: float
    """What the whole sandbox has used since it was guarded."""
    forks_refused: int
    """Processes and threads that it was refused since, having as many as it may."""
