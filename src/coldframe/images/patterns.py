"""Patterns of paths, as in COPY and .dockerignore: `* ? [a-z] [^a-z] \\x`, and `**` in the latter.

They become expressions whose time to match grows gently: patterns and names come from strangers.
"""

from __future__ import annotations

import re

_MOST_CROSSINGS = 3
_STAR = "[^/]*"


def path_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression of a path; `**` crosses directories.

    Raises:
        ValueError: it is no pattern, or one of too many `**`.
    """
    pieces = re.sub(r"(?:\*\*/?)+(?=\*\*)", "", pattern).split("**")
    if len(pieces) - 1 > _MOST_CROSSINGS:
        raise ValueError(f"{pattern[:80]!r} has more than {_MOST_CROSSINGS} times **")
    result = _component_wise(pieces[0])
    for piece in pieces[1:]:
        rest = piece.removeprefix("/")
        result += "(?:.*/)?" + _component_wise(rest) if rest else ".*"
    return _compiled(result, pattern)


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression of one name. Raises ValueError."""
    return _compiled(_component(pattern), pattern)


def is_pattern(text: str) -> bool:
    """Whether a name of a COPY line is a pattern rather than itself."""
    return re.search(r"[*?\[\\]", text) is not None


def _compiled(expression: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.S)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern[:80]!r} is no pattern ({error})") from None


def _component_wise(pattern: str) -> str:
    return "/".join(_component(one) for one in pattern.split("/"))


def _component(pattern: str) -> str:
    """Translate one component. Between two stars the first match will do: no way back is kept."""
    runs = [""]
    i = 0
    while i < len(pattern):
        char = pattern[i]
        closing = pattern.find("]", i + 2) if char == "[" else -1
        if char == "\\" and i + 1 < len(pattern):
            i += 1
            runs[-1] += re.escape(pattern[i])
        elif closing > 0:
            inside = pattern[i + 1 : closing].replace("\\", "\\\\").replace("[", "\\[")
            runs[-1] += f"(?!/)[{inside}]"
            i = closing
        elif char == "*":
            runs.append("")
        else:
            runs[-1] += "[^/]" if char == "?" else re.escape(char)
        i += 1
    first, *others = runs
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>{_STAR}?{run})" for run in middle if run) + _STAR + last
