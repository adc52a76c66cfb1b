"""Read Dockerfiles: FROM, RUN, COPY, ENV, WORKDIR, USER, by Docker's own rules.

Everything else is refused with file and line before anything is run: an instruction that was
passed over in silence would give another image than its author meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from coldframe.protocol.errors import DockerfileError

KEYWORDS = ("FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER")
_FLAGS = {"COPY": ("chown", "chmod"), "RUN": ("network",)}
_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9_-]*)\s*=\s*(.*?)\s*")
_CONTINUED = re.compile(r"\\[ \t]*$")
_FLAG = re.compile(r"--([a-zA-Z][a-zA-Z0-9-]*)(?:=(\S*))?(?:\s+|$)")
_HEREDOC = re.compile(r"\d*<<-?[^<\s]+")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Instruction:
    """One instruction as it was written."""

    where: str
    """`file:line`, for messages."""
    keyword: str
    value: str
    """What follows the keyword and its flags."""
    flags: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] | None = None
    """The elements of the exec (JSON) form; None for the shell form."""

    def refuse(self, why: str) -> DockerfileError:
        """Return the error that says what is wrong with it."""
        return DockerfileError(f"{self.where}: {why}")


def parse(text: str, shown: str) -> tuple[Instruction, ...]:
    """Return the instructions of a Dockerfile; `shown` names it in messages.

    Raises:
        DockerfileError: anything that is not supported, or not well formed.
    """
    instructions = tuple(
        _instruction(f"{shown}:{number}", line) for number, line in _logical_lines(text, shown)
    )
    if not instructions:
        raise DockerfileError(f"{shown}:1: the file holds no instruction; begin with FROM")
    if instructions[0].keyword != "FROM":
        raise instructions[0].refuse(f"{instructions[0].keyword} comes before FROM")
    for later in instructions[1:]:
        if later.keyword == "FROM":
            raise later.refuse("a second FROM (a build of several stages) is not supported yet")
    return instructions


def decode(raw: bytes, shown: str) -> str:
    """Return a Dockerfile's text.

    Raises:
        DockerfileError: it is not UTF-8, or absurdly large.
    """
    if len(raw) > _MAX_BYTES:
        raise DockerfileError(f"{shown}:1: {len(raw)} bytes are too many for a Dockerfile")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DockerfileError(f"{shown}:{line}: the file is not UTF-8") from None


def _logical_lines(text: str, shown: str) -> Iterator[tuple[int, str]]:
    """Yield instructions with the number of their first line, continuations joined.

    Comments and blank lines inside a continuation are passed over, as Docker does.
    """
    started: int | None = None
    joined = ""
    directives = True
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        if line.lstrip().startswith("#"):
            directives = directives and _directive(line.strip(), f"{shown}:{number}")
            continue
        directives = False
        if not line.strip():
            continue
        if started is None:
            started, line = number, line.lstrip()
        continued = _CONTINUED.search(line)
        joined += line[: continued.start()] if continued else line
        if not continued:
            yield started, joined.strip()
            started, joined = None, ""
    if started is not None and joined.strip():
        yield started, joined.strip()


def _directive(line: str, where: str) -> bool:
    """Judge a comment at the head of the file; True while further directives may follow."""
    match = _DIRECTIVE.fullmatch(line)
    if match is None:
        return False
    name, value = match[1].lower(), match[2]
    if name == "escape" and value != "\\":
        raise DockerfileError(f"{where}: escape={value} is not supported yet; only \\ is")
    if name == "syntax" and not value.startswith("docker/dockerfile:1"):
        raise DockerfileError(f"{where}: syntax={value} is not supported yet")
    return name in ("escape", "syntax", "check")


def _instruction(where: str, line: str) -> Instruction:
    keyword, rest = [*line.split(None, 1), ""][:2]
    keyword = keyword.upper()
    if keyword not in KEYWORDS:
        raise DockerfileError(f"{where}: {keyword[:40]} is not supported yet")
    flags, rest = _flags(where, keyword, rest)
    if not rest:
        raise DockerfileError(f"{where}: {keyword} needs an argument")
    words = _json_words(rest) if keyword in ("RUN", "COPY") else None
    if words is None and keyword in ("RUN", "COPY"):
        for word in rest.split():
            if _HEREDOC.fullmatch(word):
                raise DockerfileError(f"{where}: here-documents ({word}) are not supported yet")
    return Instruction(where, keyword, rest, flags, words)


def _flags(where: str, keyword: str, rest: str) -> tuple[dict[str, str], str]:
    flags: dict[str, str] = {}
    while match := _FLAG.match(rest):
        name, value = match[1], match[2]
        if name not in _FLAGS.get(keyword, ()) or (name == "network" and value != "none"):
            given = f"--{name}" if name != "network" else f"--network={value}"
            raise DockerfileError(f"{where}: {keyword} {given} is not supported yet")
        if not value or name in flags:
            raise DockerfileError(f"{where}: {keyword} --{name} needs one value (--{name}=VALUE)")
        flags[name] = value
        rest = rest[match.end() :]
    return flags, rest


def _json_words(rest: str) -> tuple[str, ...] | None:
    """Return the elements of a JSON list of texts; None when it is not one: shell form."""
    if not rest.startswith("["):
        return None
    try:
        value = json.loads(rest)
    except ValueError:
        return None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    return tuple(value)
