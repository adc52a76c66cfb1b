"""What a .dockerignore leaves out of a build context, by Docker's rules.

Patterns are of paths relative to the context. A later line wins over an earlier one, `!` takes
back in, `**` crosses directories, and what is below a directory that is left out is out too.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from coldframe.images.patterns import path_pattern
from coldframe.protocol.errors import DockerfileError


@dataclass(frozen=True)
class _Rule:
    expression: re.Pattern[str]
    takes_back: bool
    where: str


class Ignore:
    """The rules of one file."""

    def __init__(self, text: str = "", shown: str = ".dockerignore") -> None:
        """Raises DockerfileError for a line that is no pattern, with file and line."""
        self._rules = tuple(
            rule
            for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
            if (rule := _rule(line, f"{shown}:{number}")) is not None
        )
        self._takes_back = any(rule.takes_back for rule in self._rules)

    def leaves_out(self, path: str) -> str | None:
        """Return the line (`file:line`) that leaves a path out; None: it is in.

        `path` has no leading slash; the context itself (`""`) is always in.
        """
        found: str | None = None
        parents = [path[:at] for at, char in enumerate(path) if char == "/"] if path else []
        for rule in self._rules:
            if rule.takes_back == (found is not None) and any(
                rule.expression.fullmatch(one) for one in (*parents, path) if one
            ):
                found = None if rule.takes_back else rule.where
        return found

    def hides_all_below(self, path: str) -> bool:
        """Whether nothing below a directory can be in."""
        return not self._takes_back and self.leaves_out(path) is not None


def _rule(line: str, where: str) -> _Rule | None:
    if line.startswith("#"):
        return None
    pattern = line.strip()
    takes_back = pattern.startswith("!")
    if takes_back:
        pattern = pattern[1:].strip()
        if not pattern:
            raise DockerfileError(f"{where}: ! takes nothing back; write a pattern after it")
    if not pattern:
        return None
    pattern = posixpath.normpath("/" + pattern).lstrip("/")
    if not pattern:
        return None  # the context itself is never left out
    try:
        return _Rule(path_pattern(pattern), takes_back, where)
    except ValueError as error:
        raise DockerfileError(f"{where}: {error}") from None
