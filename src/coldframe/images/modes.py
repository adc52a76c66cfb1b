"""Permission bits as --chmod gives them: octal (`0755`), or changes (`+x`, `u=rwX,go=rX`)."""

from __future__ import annotations

import re
import stat

_OCTAL = re.compile(r"0*[0-7]{1,4}")
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=][rwxXst]*)+)")
_WHO = {"u": 0o4700, "g": 0o2070, "o": 0o1007, "a": 0o7777}
_BITS = {"r": 0o444, "w": 0o222, "x": 0o111, "s": 0o6000, "t": 0o1000}


def is_mode(text: str) -> bool:
    """Whether a text gives a mode."""
    return bool(_OCTAL.fullmatch(text) or all(_CLAUSE.fullmatch(part) for part in text.split(",")))


def changed(mode: int, text: str) -> int:
    """Return a file's whole mode (its kind included) as permission bits after a change.

    `text` is one that `is_mode` takes. No umask counts.
    """
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    bits = stat.S_IMODE(mode)
    cleared = ~0o6000 if stat.S_ISDIR(mode) else ~0  # by `=`; a directory's lose theirs by `-`
    for clause in text.split(","):
        match = _CLAUSE.fullmatch(clause)
        assert match is not None
        who = 0
        for letter in match[1] or "a":
            who |= _WHO[letter]
        for operator, letters in re.findall(r"([-+=])([rwxXst]*)", match[2]):
            given = who & _given(letters, executable=stat.S_ISDIR(mode) or bool(bits & 0o111))
            if operator == "=":
                bits = (bits & ~(who & cleared)) | given
            else:
                bits = bits | given if operator == "+" else bits & ~given
    return bits


def _given(letters: str, *, executable: bool) -> int:
    bits = 0
    for letter in letters:
        bits |= _BITS["x"] * executable if letter == "X" else _BITS[letter]
    return bits
