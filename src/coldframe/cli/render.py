"""What every command prints alike: the version, one-line sentences, sizes, tables."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata

from coldframe.protocol.errors import InvalidRequestError

_UNITS = {
    "": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "B": 1,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def version() -> str:
    """Return the installed version, or `unknown` when run from a bare source tree."""
    try:
        return metadata.version("coldframe")
    except metadata.PackageNotFoundError:
        return "unknown"


def sentence(text: str) -> str:
    """Return text on one line without control characters: it may come out of a sandbox."""
    return safe(" ".join(text.split())) or "no reason was given"


def block(text: str) -> str:
    """Return text whose first line is a sentence, and whose others are shown as they were."""
    first, *others = text.splitlines() or [""]
    return "\n".join([sentence(first), *(f"  {safe(line.expandtabs())}" for line in others)])


def safe(text: str) -> str:
    """Replace control characters and halves of characters: hostile text cannot drive the terminal.

    Halves cannot be printed at all; a model's JSON may hold them.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def seconds(value: float | None) -> str:
    """Return seconds, or a dash where they are not known."""
    return "-" if value is None else f"{value:.2f}"


def parse_size(text: str) -> int:
    """Return bytes: `1048576`, `512M`, `4GiB`; K, M, G, T are binary, KB, MB, GB, TB decimal.

    Raises:
        InvalidRequestError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise InvalidRequestError(f"{text!r} is not a size; write for example 512M or 4GiB")
    return int(float(match.group(1)) * unit)


def parse_env(pairs: Iterable[str]) -> dict[str, str]:
    """Return `NAME=VALUE` words as a map.

    Raises:
        InvalidRequestError: a word without `=` or with an empty name.
    """
    result = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--env {pair!r}: write NAME=VALUE")
        result[name] = value
    return result


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return columns padded to their widest cell, without trailing blanks."""
    lines = [list(header), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def day(unix: float) -> str:
    """Return a moment as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))


def moment(unix: float) -> str:
    """Return a moment as local date and time, with seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def listing(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Print a table; if it has no rows, say on stderr that there is nothing."""
    print(table(header, rows))
    if not rows:
        print(nothing, file=sys.stderr)


def size(size_bytes: int) -> str:
    """Return bytes in the largest unit of which there is at least one: 512 MiB, 4 GiB."""
    for unit in ("TIB", "GIB", "MIB", "KIB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.4g} {unit[0]}iB"
    return f"{size_bytes} B"


def discard_stdout() -> None:
    """Point stdout at /dev/null: its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
