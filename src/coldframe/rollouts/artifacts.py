"""Which files of a sandbox a task declares as artifacts, and where they go.

Only what is declared leaves the sandbox. Where an artifact lies outside follows from its source,
or from its destination if it has one; two that would lie in each other's place refuse the task.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from itertools import combinations
from pathlib import PurePosixPath

CONVENTION = "/logs/artifacts"
"""Taken from every sandbox, declared or not."""
MANIFEST = "manifest.json"
MAIN_SERVICE = "main"


@dataclass(frozen=True)
class Artifact:
    """A file or directory to take from the agent's sandbox."""

    source: str
    """Absolute, without `..`. In a separate verifier it gets this very path again."""
    destination: str | None = None
    """Relative to the artifacts' directory; None: the source's own path below it."""
    exclude: tuple[str, ...] = ()
    """Patterns of what is left out of a directory, as tar's --exclude has them."""

    @property
    def target(self) -> PurePosixPath:
        """Where it lies, relative to the artifacts' directory."""
        return PurePosixPath((self.destination or self.source).lstrip("/") or ".")

    def excludes(self, name: str) -> bool:
        """Whether a name, relative to the source, is left out, and all below it.

        A pattern may match from the beginning of any part of the name on; `*` and `?` match
        slashes too. `*.pyc`, `build`, `a/b` and `./only-at-the-top` all do what they say.
        Whoever walks a tree asks for every directory before what lies in it.
        """
        text = "/".join((".", *PurePosixPath(name).parts))
        return any(_pattern(pattern).search(text) for pattern in self.exclude)

    def covers(self, later: Artifact) -> bool:
        """Whether it brings everything that a later one asks for, to the same place."""
        source, own = PurePosixPath(later.source), PurePosixPath(self.source)
        if not source.is_relative_to(own) or later.target != self.target / source.relative_to(own):
            return False
        return not self.exclude or (source == own and self.exclude == later.exclude)


@lru_cache(maxsize=1024)
def _pattern(pattern: str) -> re.Pattern[str]:
    """Return what finds a pattern at the end of a name, from the beginning of a part on.

    By one search for a name: an agent may make many, of hundreds of parts each.
    """
    return re.compile(f"(?:^|(?<=/)){translate(pattern.rstrip('/'))}")


def with_convention(artifacts: Sequence[Artifact]) -> tuple[Artifact, ...]:
    """Return the artifacts after /logs/artifacts, unless they declare that themselves."""
    if any(PurePosixPath(one.source) == PurePosixPath(CONVENTION) for one in artifacts):
        return tuple(artifacts)
    return (Artifact(CONVENTION), *artifacts)


def clash(artifacts: Sequence[Artifact]) -> tuple[Artifact, Artifact] | None:
    """Return the first two artifacts of which one would lie in the other's place."""
    for first, second in combinations(artifacts, 2):
        if first.covers(second):
            continue
        a, b = first.target, second.target
        if a.is_relative_to(b) or b.is_relative_to(a):
            return first, second
    return None
