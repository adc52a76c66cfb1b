"""Read what others left on disk: within bounds, and never by a link or out of its directory."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from coldframe.protocol import strict_json
from coldframe.protocol.errors import ColdframeError, Side
from coldframe.protocol.text import excerpt

MAX_FILE_BYTES = 128 << 20
MAX_TRIAL_BYTES = 1 << 30
MAX_ENTRIES = 100_000
M = TypeVar("M", bound=BaseModel)


class ImportRefusedError(ColdframeError):
    """Something that was to be imported is not what it should be; names file and field."""

    code = "import_refused"
    side = Side.CALLER

    def __init__(self, file: str, field: str, problem: str) -> None:
        self.file, self.field, self.problem = file, field, problem
        super().__init__(": ".join(one for one in (file, field, problem) if one))


class Folder:
    """A directory that somebody else wrote. Counts what was read of it."""

    def __init__(self, fd: int, shown: str) -> None:
        self._fd, self.shown = fd, shown
        self._read = 0

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Folder]:
        """Open a directory that the caller named; only in there no link is followed.

        Raises:
            ImportRefusedError: there is no such directory.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ImportRefusedError(str(path), "", error.strerror or str(error)) from None
        try:
            yield cls(fd, str(path))
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """Return what lies in there, sorted.

        Raises:
            ImportRefusedError: that is more than `MAX_ENTRIES`.
        """
        found = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) > MAX_ENTRIES:
                    raise ImportRefusedError(self.shown, "", f"holds over {MAX_ENTRIES} entries")
        return sorted(found)

    @contextmanager
    def inside(self, name: str) -> Iterator[Folder | None]:
        """Open a directory in there; None if there is none of that name."""
        fd = self._walk((name,), os.O_RDONLY | os.O_DIRECTORY)
        if fd is None:
            yield None
            return
        try:
            yield Folder(fd, name)
        finally:
            os.close(fd)

    def read(self, *path: str, limit: int = MAX_FILE_BYTES) -> bytes | None:
        """Return a file's content; None if there is none.

        Args:
            path: its components.
        Raises:
            ImportRefusedError: a link stands in the way, it is no regular file, or it is too large.
        """
        fd = self._walk(path, os.O_RDONLY | os.O_NONBLOCK)
        if fd is None:
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImportRefusedError(self._named(path), "", "is no regular file")
        with os.fdopen(fd, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ImportRefusedError(self._named(path), "", f"is over {limit} bytes")
        self._read += len(content)
        if self._read > MAX_TRIAL_BYTES:
            raise ImportRefusedError(self.shown, "", f"holds over {MAX_TRIAL_BYTES} bytes to read")
        return content

    def _walk(self, path: tuple[str, ...], last: int) -> int | None:
        """Return a descriptor of what lies there, each component opened on its own."""
        for one in path:
            if one in ("", ".", "..") or "/" in one or "\0" in one:
                problem = f"{excerpt(one)} is no name of a file in there"
                raise ImportRefusedError(self.shown, "", problem)
        at = os.dup(self._fd)
        for place, name in enumerate(path):
            whole = place == len(path) - 1
            flags = (last if whole else os.O_RDONLY | os.O_DIRECTORY) | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                deeper = os.open(name, flags, dir_fd=at)
            except FileNotFoundError:
                return None
            except OSError as error:
                is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
                problem = "is a link or no directory; links are not followed"
                raise ImportRefusedError(
                    self._named(path[: place + 1]), "", problem if is_link else str(error.strerror)
                ) from None
            finally:
                os.close(at)
            at = deeper
        return at

    def _named(self, path: tuple[str, ...]) -> str:
        return "/".join((self.shown, *path))


def parse(content: bytes, file: str) -> Any:
    """Return JSON that somebody else wrote.

    Raises:
        ImportRefusedError: it is none, or could mean two things.
    """
    try:
        value = strict_json.parse(content)
        if b"\\ud" in content.lower():
            # Half a surrogate pair is JSON, but no text: nothing that holds it can be written.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeError:
        raise ImportRefusedError(file, "", "holds text that is no Unicode") from None
    except strict_json.NotStrictError as error:
        raise ImportRefusedError(file, "", str(error)) from None


def validated(model: type[M], value: Any, file: str) -> M:
    """Return a value as a model.

    Raises:
        ImportRefusedError: it is none; names the first field that is wrong.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ImportRefusedError(file, field, first["msg"]) from None
