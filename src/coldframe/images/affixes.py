"""Cut and replace what a shell pattern matches: `${a#x}`, `${a%x}`, `${a/x/y}` and their like.

`*` is any text, `?` any character, `\\x` that character. Time grows gently with pattern and value.
"""

from __future__ import annotations

import re

_ANY, _ANYTHING = "?", "*"


def without_prefix(value: str, pattern: str, *, longest: bool) -> str:
    """Return the value without what the pattern matches at its beginning."""
    match = re.match(_expression(_tokens(pattern), longest), value, re.S)
    return value[match.end() :] if match else value


def without_suffix(value: str, pattern: str, *, longest: bool) -> str:
    """Return the value without what the pattern matches at its end."""
    match = re.match(_expression(_tokens(pattern)[::-1], longest), value[::-1], re.S)
    return value[: len(value) - match.end()] if match else value


def replaced(value: str, pattern: str, replacement: str, *, everywhere: bool) -> str:
    """Return the value with the first match, or every one, replaced; the longest counts."""
    expression = _expression(_tokens(pattern), longest=True)
    return re.sub(
        expression,
        lambda match: replacement if match[0] else "",
        value,
        count=0 if everywhere else 1,
        flags=re.S,
    )


def _tokens(pattern: str) -> list[str]:
    """Cut a pattern into signs, and characters that stand for themselves (escaped)."""
    found = re.findall(r"\\(.)|(.)", pattern, re.S)
    return [
        re.escape(escaped) if escaped else plain if plain in (_ANY, _ANYTHING) else re.escape(plain)
        for escaped, plain in found
    ]


def _expression(tokens: list[str], longest: bool) -> str:
    """Between two stars the first match will do: no way back is kept."""
    runs = [""]
    for token in tokens:
        if token == _ANYTHING:
            runs.append("")
        else:
            runs[-1] += "." if token == _ANY else token
    first, *others = runs
    if not others:
        return first
    *middle, last = others
    star = ".*" if longest else ".*?"
    return first + "".join(f"(?>.*?{run})" for run in middle if run) + star + last
