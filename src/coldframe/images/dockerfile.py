"""Read Dockerfiles into instructions by Docker's own rules. Form only: nothing is replaced yet.

What cannot be honoured is refused with file and line before anything is run: an instruction or
flag that was passed over in silence would give another image than its author meant.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from coldframe.images.lines import Heredoc, Line, cut
from coldframe.protocol.errors import BuildStepError, DockerfileError

KEYWORDS = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"),
    *("LABEL", "MAINTAINER", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
)
_FLAGS = {
    "ADD": ("chown", "chmod", "link", "exclude"),
    "COPY": ("from", "chown", "chmod", "link", "exclude", "parents"),
    "FROM": ("platform",),
    "HEALTHCHECK": ("interval", "timeout", "start-period", "start-interval", "retries"),
    "RUN": ("network", "mount"),
}
_REPEATED = ("mount", "exclude")
_SWITCHES = ("link", "parents")
"""True where they are only named. A layer stands by itself here anyway, so --link does nothing."""
_JSON = ("ADD", "CMD", "COPY", "ENTRYPOINT", "RUN", "SHELL", "VOLUME")
_NOT_TRIGGERED = ("FROM", "ONBUILD", "MAINTAINER")
_FLAG = re.compile(r"--([a-zA-Z][a-zA-Z0-9-]*)(?:=((?:\"[^\"]*\"|'[^']*'|[^\s\"'])*))?(?:\s+|$)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_INSTRUCTIONS = 1000
_MAX_BYTES = 1 << 20
_MOST_SHOWN = 120


@dataclass(frozen=True)
class Instruction:
    """One instruction as it was written."""

    where: str
    """`file:line`, for messages."""
    keyword: str
    value: str
    """What follows the keyword and its flags."""
    flags: dict[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    """Values of --mount, which may be given several times."""
    excludes: tuple[str, ...] = ()
    """Values of --exclude, which may be given several times."""
    words: tuple[str, ...] | None = None
    """The elements of the exec (JSON) form; None for the shell form."""
    heredocs: tuple[Heredoc, ...] = ()
    escape: str = "\\"

    def refuse(self, why: str) -> DockerfileError:
        """Return the error that says what is wrong with it."""
        return DockerfileError(f"{self.where}: {why}")

    def failed(self, how: str) -> BuildStepError:
        """Return the error that says how it ended when it was run."""
        return BuildStepError(f"{self.where}: `{self.shown}` {how}")

    @property
    def shown(self) -> str:
        """The instruction on one line, the end left out where it is long."""
        line = " ".join(self.text.split())
        return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 1]}…"

    @property
    def text(self) -> str:
        """The whole instruction on one line, without here-documents."""
        flags = [f"--{name}={value}" for name, value in self.flags.items()]
        flags += [f"--mount={value}" for value in self.mounts]
        flags += [f"--exclude={value}" for value in self.excludes]
        return " ".join([self.keyword, *flags, self.value])


def parse(text: str, shown: str) -> tuple[Instruction, ...]:
    """Return the instructions of a Dockerfile; `shown` names it in messages.

    Raises:
        DockerfileError: anything that is not supported, or not well formed.
    """
    whole = cut(text, shown)
    instructions = tuple(
        _instruction(f"{shown}:{line.number}", line, whole.escape) for line in whole.lines
    )
    if len(instructions) > _MOST_INSTRUCTIONS:
        raise instructions[_MOST_INSTRUCTIONS].refuse(
            f"more than {_MOST_INSTRUCTIONS} instructions; build on an image that holds a part"
        )
    if not instructions:
        raise DockerfileError(f"{shown}:1: the file holds no instruction; begin with FROM")
    first = next((one for one in instructions if one.keyword != "ARG"), None)
    if first is None:
        raise instructions[-1].refuse("the file has no FROM")
    if first.keyword != "FROM":
        raise first.refuse(f"{first.keyword} comes before FROM; only ARG may")
    return instructions


def parse_trigger(text: str, where: str, escape: str = "\\") -> Instruction:
    """Return the instruction that an ONBUILD holds.

    Raises:
        DockerfileError: it is none, or one that no ONBUILD may hold.
    """
    lines = cut(text, where).lines
    if len(lines) != 1:
        raise DockerfileError(f"{where}: ONBUILD holds one instruction")
    trigger = _instruction(where, lines[0], escape)
    if trigger.keyword in _NOT_TRIGGERED:
        raise trigger.refuse(f"ONBUILD {trigger.keyword} is not possible")
    return trigger


def decode(raw: bytes, shown: str) -> str:
    """Return a Dockerfile's text.

    Raises:
        DockerfileError: it is not UTF-8, or absurdly large.
    """
    if len(raw) > _MAX_BYTES:
        raise DockerfileError(f"{shown}:1: more than {_MAX_BYTES} bytes are no Dockerfile")
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise DockerfileError(f"{shown}:{line}: the file holds a NUL byte")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DockerfileError(f"{shown}:{line}: the file is not UTF-8") from None


def _instruction(where: str, line: Line, escape: str) -> Instruction:
    keyword, rest = [*line.text.split(None, 1), ""][:2]
    keyword = keyword.upper()
    if keyword not in KEYWORDS:
        known = ", ".join(KEYWORDS)
        raise DockerfileError(f"{where}: {keyword[:40]!r} is no instruction; there are: {known}")
    flags, repeated, rest = _flags(where, keyword, rest)
    if not rest:
        raise DockerfileError(f"{where}: {keyword} needs an argument")
    words = _json_words(rest) if keyword in _JSON else None
    if words and any("\0" in word or _SURROGATE.search(word) for word in words):
        raise DockerfileError(f"{where}: {keyword}: a word is no text that a path could hold")
    heredocs = line.heredocs if words is None else ()
    mounts, excludes = (tuple(repeated[name]) for name in _REPEATED)
    return Instruction(where, keyword, rest, flags, mounts, excludes, words, heredocs, escape)


def _flags(where: str, keyword: str, rest: str) -> tuple[dict[str, str], dict[str, list[str]], str]:
    flags: dict[str, str] = {}
    repeated: dict[str, list[str]] = {name: [] for name in _REPEATED}
    while match := _FLAG.match(rest):
        name, value = match[1], match[2]
        if name not in _FLAGS.get(keyword, ()):
            raise DockerfileError(f"{where}: {keyword} --{name} is not supported; remove it")
        if name in _SWITCHES:
            value = value or "true"
            if value not in ("true", "false"):
                raise DockerfileError(f"{where}: {keyword} --{name} is true or false")
        if not value or name in flags:
            raise DockerfileError(f"{where}: {keyword} --{name} needs one value (--{name}=VALUE)")
        if name in repeated:
            repeated[name].append(value)
        else:
            flags[name] = value
        rest = rest[match.end() :]
    return flags, repeated, rest


def _json_words(rest: str) -> tuple[str, ...] | None:
    """Return the elements of a JSON list of texts; None when it is not one: shell form."""
    return json_words(rest) if rest.startswith("[") else None


def json_words(text: str) -> tuple[str, ...] | None:
    """Return the elements of a JSON list of texts; None when it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    return tuple(value)
