"""Read unified diffs as git and diff write them, and apply them to bytes. No I/O, no guessing.

A hunk fits where it says or not at all. Lines end with a newline byte alone: a carriage return
is part of its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from coldframe.protocol.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_DEV_NULL = b"/dev/null"
_NO_NEWLINE = b"\\ "
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a",
            b"b": b"\b", b"f": b"\f", b"v": b"\v"}  # fmt: skip
_MOST_COMPARED = 10_000_000
"""Lines that are compared at most to say where else a hunk would fit: some 0.1 s."""
_MODES = {b"100644": 0o644, b"100755": 0o755}


@dataclass(frozen=True)
class Hunk:
    """One place of change. Lines carry their newline unless the file ends without one."""

    old_start: int
    """Counts from 1; 0 when there is no old line."""
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    line: int
    """Where it stands in the patch, for messages."""


@dataclass
class FileChange:
    """What a patch does to one file. Paths as text, without the leading parts stripped."""

    old_path: str | None = None
    """None: the file is new."""
    new_path: str | None = None
    """None: the file is deleted."""
    mode: int | None = None
    """Permission bits to set; None: as it was."""
    copy: bool = False
    """The old path stays too."""
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path to speak of."""
        return self.new_path or self.old_path or "?"


def parse(patch: bytes, strip: int) -> list[FileChange]:
    """Read a patch.

    Raises:
        PatchError: malformed, binary, a link or submodule, a path that leads outside, a file
            twice, or nothing to apply at all; the message names the line.
    """
    changes = _Parser(patch, strip).run()
    if not changes:
        raise PatchError("the patch holds no change to any file")
    seen: set[str] = set()
    for change in changes:
        for path in {change.new_path, None if change.copy else change.old_path} - {None}:
            assert path is not None
            if path in seen:
                raise PatchError(f"{path}: the patch changes this file twice")
            seen.add(path)
    return changes


class _Parser:
    def __init__(self, patch: bytes, strip: int) -> None:
        self._lines = _split(patch)
        self._at = 0
        self._strip = strip
        self._changes: list[FileChange] = []

    def _fail(self, what: str, at: int | None = None) -> PatchError:
        return PatchError(f"patch line {(self._at if at is None else at) + 1}: {what}")

    def _peek(self, ahead: int = 0) -> bytes:
        index = self._at + ahead
        return self._lines[index] if index < len(self._lines) else b""

    def run(self) -> list[FileChange]:
        while self._at < len(self._lines):
            line = self._peek()
            if line.startswith(b"diff --git "):
                self._git_file()
            elif line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                change = FileChange()
                self._file_names(change, git=False)
                self._hunks(change)
                self._changes.append(change)
            elif line.startswith(b"@@ -"):
                raise self._fail("a hunk without a file")
            else:
                self._at += 1  # prose before, between and after: mail headers, "Index:"
        return self._changes

    # --- files ------------------------------------------------------------------------

    def _git_file(self) -> None:
        start = self._at
        change = FileChange()
        new = deleted = False
        self._at += 1
        while self._at < len(self._lines):
            key, value = _header(self._peek())
            if key == b"":
                break
            self._at += 1
            if key in (b"new file mode", b"new mode"):
                change.mode = self._mode(value)
                new |= key == b"new file mode"
            elif key in (b"deleted file mode", b"old mode"):
                self._mode(value)
                deleted |= key == b"deleted file mode"
            elif key in (b"rename from", b"copy from"):
                change.old_path = self._path(value, max(self._strip - 1, 0))
            elif key in (b"rename to", b"copy to"):
                change.new_path = self._path(value, max(self._strip - 1, 0))
                change.copy = key == b"copy to"
            elif key == b"binary":
                raise self._fail("a binary patch; write the file instead", self._at - 1)
        named = change.new_path is not None
        if self._peek().startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
            self._file_names(change, git=True, named=named)
        elif not named:
            name = self._same_name(self._lines[start], start)
            change.old_path, change.new_path = name, name
        if new:
            change.old_path = None
        if deleted:
            change.new_path = None
        self._hunks(change)
        self._changes.append(change)

    def _mode(self, text: bytes) -> int:
        if text not in _MODES:
            kind = {b"120000": "a symbolic link", b"160000": "a submodule"}.get(text, "a mode")
            raise self._fail(f"{kind} ({text.decode('ascii', 'replace')})", self._at - 1)
        return _MODES[text]

    def _file_names(self, change: FileChange, *, git: bool, named: bool = False) -> None:
        names = [self._name(self._peek(i)[4:], git=git) for i in (0, 1)]
        if names == [None, None]:
            raise self._fail("both names are /dev/null")
        if not named:
            change.old_path, change.new_path = names
            if None not in names and names[0] != names[1]:
                raise self._fail(f"two names, {names[0]} and {names[1]}, without a rename")
        self._at += 2

    def _name(self, text: bytes, *, git: bool) -> str | None:
        text = text.rstrip(b"\r\n")
        if not text.startswith(b'"'):
            # diff and git both put a tab after a name that holds blanks; diff adds a time.
            text = text.partition(b"\t")[0]
        if text == _DEV_NULL:
            return None
        return self._path(text, self._strip)

    def _path(self, text: bytes, strip: int) -> str:
        raw = _unquote(text) if text.startswith(b'"') else text
        parts = raw.split(b"/")
        kept = [part for part in parts[strip:] if part not in (b"", b".")]
        if len(parts) <= strip or not kept:
            raise self._fail(f"{_show(raw)}: fewer than {strip} parts to strip")
        if b".." in kept or (strip == 0 and raw.startswith(b"/")) or b"\0" in raw:
            raise self._fail(f"{_show(raw)}: leads outside")
        return b"/".join(kept).decode("utf-8", "surrogateescape")

    def _same_name(self, line: bytes, at: int) -> str:
        """The name of a `diff --git a/N b/N` without other headers: both halves say the same."""
        rest = line[len(b"diff --git ") :].rstrip(b"\r\n")
        if rest.startswith(b'"'):
            first, _, second = rest[1:].partition(b'" "')
            pair = (b'"' + first + b'"', b'"' + second)
        else:
            pair = (rest[: len(rest) // 2], rest[len(rest) // 2 + 1 :])
        names = [self._path(text, self._strip) for text in pair]
        if names[0] != names[1]:
            raise self._fail("which file this is cannot be told", at)
        return names[0]

    # --- hunks ------------------------------------------------------------------------

    def _hunks(self, change: FileChange) -> None:
        while (match := _HUNK.match(self._peek())) is not None:
            change.hunks.append(self._hunk(match))
        created, deleted = change.old_path is None, change.new_path is None
        if created and any(hunk.old for hunk in change.hunks):
            raise self._fail(f"{change.path}: a new file with old lines")
        if deleted and any(hunk.new for hunk in change.hunks):
            raise self._fail(f"{change.path}: a deleted file with new lines")
        whole_file = created or deleted or change.old_path != change.new_path
        if not change.hunks and change.mode is None and not whole_file:
            raise self._fail(f"{change.path}: no hunks and nothing else to do")

    def _hunk(self, match: re.Match[bytes]) -> Hunk:
        at = self._at
        old_start = int(match[1])
        old_left, new_left = (int(match[i]) if match[i] is not None else 1 for i in (2, 4))
        self._at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        last: list[list[bytes]] = []
        while old_left or new_left or self._peek().startswith(_NO_NEWLINE):
            line = self._peek()
            if not line:
                raise self._fail("the hunk ends early", at)
            mark, text = line[:1], line[1:]
            if mark in (b"\n", b"\r"):  # editors strip the blank of an empty context line
                mark, text = b" ", line
            if line.startswith(_NO_NEWLINE):
                for lines in last:
                    lines[-1] = lines[-1].removesuffix(b"\n")
                last = []
            elif mark in (b" ", b"-", b"+"):
                last = [old] if mark == b"-" else [new] if mark == b"+" else [old, new]
                for lines in last:
                    lines.append(text if text.endswith(b"\n") else text + b"\n")
                old_left -= mark != b"+"
                new_left -= mark != b"-"
            else:
                raise self._fail("not a line of a hunk (context, -, +)")
            if old_left < 0 or new_left < 0:
                raise self._fail("more lines than the hunk's header says")
            self._at += 1
        return Hunk(old_start, tuple(old), tuple(new), at + 1)


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    whole = [line + b"\n" for line in lines[:-1]]
    return whole + ([lines[-1]] if lines[-1] else [])


def _header(line: bytes) -> tuple[bytes, bytes]:
    text = line.rstrip(b"\r\n")
    for key in (b"new file mode", b"deleted file mode", b"old mode", b"new mode", b"rename from",
                b"rename to", b"copy from", b"copy to", b"similarity index",
                b"dissimilarity index", b"index"):  # fmt: skip
        if text.startswith(key + b" "):
            return key, text[len(key) + 1 :]
    if text.startswith(b"GIT binary patch") or text.startswith(b"Binary files "):
        return b"binary", b""
    return b"", b""


def _unquote(text: bytes) -> bytes:
    def one(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return _ESCAPES[code] if code in _ESCAPES else bytes([int(code, 8) & 0xFF])

    return re.sub(rb'\\([0-7]{3}|[ntr"\\abfv])', one, text.strip(b'"'))


def _show(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def apply(old: bytes, change: FileChange) -> bytes:
    """Return the content after the change.

    Raises:
        PatchError: a hunk does not fit where it says; the message names the first line that
            differs, and, unless that takes long to find, where the hunk would fit.
    """
    lines = _split(old)
    result: list[bytes] = []
    done = 0
    for number, hunk in enumerate(change.hunks, 1):
        # With no old lines the header names the line after which the new ones come.
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        where = f"{change.path}: hunk {number} (patch line {hunk.line})"
        if start < done:
            raise PatchError(f"{where} overlaps the one before it")
        _check_fit(lines, hunk, start, where)
        result += lines[done:start]
        result += hunk.new
        done = start + len(hunk.old)
    rest = lines[done:]
    if change.new_path is None and rest:
        raise PatchError(f"{change.path}: has lines that the patch, which deletes it, does not")
    content = result + rest
    if any(not line.endswith(b"\n") for line in content[:-1]):
        raise PatchError(f"{change.path}: lines would follow a line without a newline")
    return b"".join(content)


def _check_fit(lines: list[bytes], hunk: Hunk, start: int, where: str) -> None:
    size = len(hunk.old)
    if start <= len(lines) and tuple(lines[start : start + size]) == hunk.old:
        return
    for offset, expected in enumerate(hunk.old):
        found = lines[start + offset] if start + offset < len(lines) else None
        if found != expected:
            what = "the file ends" if found is None else f"found {found[:120]!r}"
            message = f"{where}: line {start + offset + 1}: expected {expected[:120]!r}, {what}"
            break
    else:
        message = f"{where}: the file has {len(lines)} lines, not {start}"
    fits: list[int] = []
    if len(lines) * size <= _MOST_COMPARED:
        places = range(len(lines) - size + 1)
        fits = [i + 1 for i in places if tuple(lines[i : i + size]) == hunk.old][:3]
    if hunk.old and fits:
        message += f"; its old lines stand at line {', '.join(map(str, fits))}"
    raise PatchError(message)
