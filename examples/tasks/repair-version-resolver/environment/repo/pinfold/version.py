"""Versions and their precedence."""

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-([0-9A-Za-z.-]+))?(?:\+([0-9A-Za-z.-]+))?")


@dataclass(frozen=True)
class Version:
    major: int
    minor: int
    patch: int
    prerelease: tuple = ()
    build: str = ""

    @classmethod
    def parse(cls, text):
        """Return the version that the text names; ValueError if it names none."""
        match = _PATTERN.match(text)
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        major, minor, patch, prerelease, build = match.groups()
        return cls(
            int(major),
            int(minor),
            int(patch),
            tuple(prerelease.split(".")) if prerelease else (),
            build or "",
        )

    @property
    def release(self):
        return (self.major, self.minor, self.patch)

    def key(self):
        """A value that sorts as the version does."""
        return (*self.release, self.prerelease, self.build)


def compare(a, b):
    """Return -1, 0 or 1 as version text a is lower than, equal to or higher than b."""
    left, right = Version.parse(a).key(), Version.parse(b).key()
    return (left > right) - (left < right)
