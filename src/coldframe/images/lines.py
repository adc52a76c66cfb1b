"""Cut a Dockerfile into logical lines: directives, comments, continuations, here-documents.

Knows no instruction but those whose words may begin a here-document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from coldframe.images.variables import WordError, split_words, unquoted
from coldframe.protocol.errors import DockerfileError

_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9_-]*)\s*=\s*(.*?)\s*")
_HEREDOC = re.compile(r"\d*<<(-?)([^<]+)")
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
_SYNTAX = re.compile(r"(docker\.io/)?docker/dockerfile(-upstream)?(:\S*)?")
_DIRECTIVES = ("escape", "syntax", "check")


@dataclass(frozen=True)
class Heredoc:
    """A here-document: `<<NAME`, the lines up to NAME."""

    name: str
    text: str
    """As it was written, each line with its end; leading tabs still there."""
    expands: bool
    """Whether variables are replaced: its name was not quoted."""
    strips_tabs: bool
    """`<<-`: leading tabs do not count."""

    @property
    def content(self) -> str:
        """What the file holds, variables not yet replaced."""
        return re.sub(r"^\t+", "", self.text, flags=re.M) if self.strips_tabs else self.text


@dataclass(frozen=True)
class Line:
    """One logical line, continuations joined."""

    number: int
    """Of its first physical line, from 1."""
    text: str
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True)
class Lines:
    """A Dockerfile as logical lines, and the character that escapes in it."""

    escape: str
    lines: tuple[Line, ...]


def cut(text: str, shown: str) -> Lines:
    r"""Return the logical lines of a Dockerfile; `shown` names it in messages.

    Comments and blank lines inside a continuation are passed over, as Docker does.

    Raises:
        DockerfileError: a directive that cannot be honoured, or a here-document without an end.
    """
    physical = [line.removesuffix("\r") for line in text.split("\n")]
    escape, first = _directives(physical, shown)
    return Lines(escape, tuple(_Cutter(physical, shown, escape).lines(first)))


def _directives(lines: list[str], shown: str) -> tuple[str, int]:
    """Return the escape character, and the index of the first line that is no directive."""
    found: dict[str, str] = {}
    for index, line in enumerate(lines):
        match = _DIRECTIVE.fullmatch(line.strip())
        name = match[1].lower() if match else ""
        if match is None or name not in _DIRECTIVES:
            return found.get("escape", "\\"), index
        where = f"{shown}:{index + 1}"
        if name in found:
            raise DockerfileError(f"{where}: a second {name} directive; keep one of them")
        found[name] = match[2]
        if name == "escape" and match[2] not in ("\\", "`"):
            raise DockerfileError(f"{where}: escape={match[2]} is not possible; write \\ or `")
        if name == "syntax" and not _SYNTAX.fullmatch(match[2]):
            raise DockerfileError(
                f"{where}: syntax={match[2]} is another language than docker/dockerfile; "
                "remove the line if the file needs nothing of it"
            )
    return found.get("escape", "\\"), len(lines)


class _Cutter:
    def __init__(self, lines: list[str], shown: str, escape: str) -> None:
        self._lines, self._shown, self._escape = lines, shown, escape
        token = re.escape(escape)
        self._continued = re.compile(rf"(?:^|(?<=[^{token}])){token}[ \t]*$")
        self._at = 0

    def lines(self, first: int) -> Iterator[Line]:
        """Yield the logical lines from a physical one on."""
        self._at = first
        started: int | None = None
        joined = ""
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if started is None:
                started, line = self._at, line.lstrip()
            continued = self._continued.search(line)
            joined += line[: continued.start()] if continued else line
            if not continued:
                yield self._line(started, joined.strip())
                started, joined = None, ""
        if started is not None and joined.strip():
            yield self._line(started, joined.strip())

    def _line(self, number: int, text: str) -> Line:
        return Line(number, text, tuple(self._heredocs(number, text)))

    def _heredocs(self, number: int, text: str) -> Iterator[Heredoc]:
        keyword, rest = [*text.split(None, 1), "", ""][:2]
        if keyword.upper() == "ONBUILD":
            keyword, rest = [*rest.split(None, 1), "", ""][:2]
        if keyword.upper() not in _WITH_HEREDOCS:
            return
        try:
            words = list(split_words(rest, self._escape))
        except WordError:
            return  # a command line that the shell will judge
        for word in words:
            match = _HEREDOC.fullmatch(word)
            if match is not None and (name := unquoted(match[2])):
                yield self._heredoc(number, name, match[2] == name, bool(match[1]))

    def _heredoc(self, number: int, name: str, expands: bool, strips_tabs: bool) -> Heredoc:
        begin = self._at
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if (line.lstrip("\t") if strips_tabs else line) == name:
                text = "".join(f"{one}\n" for one in self._lines[begin : self._at - 1])
                return Heredoc(name, text, expands, strips_tabs)
        raise DockerfileError(
            f"{self._shown}:{number}: the here-document {name!r} has no end: "
            f"close it with a line that holds {name} alone"
        )
