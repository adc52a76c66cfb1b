"""Names of images: `debian:bookworm`, `team/tool:1.2`; the tag is `latest` unless given."""

from __future__ import annotations

import re

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.text import excerpt

_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_NAME = re.compile(
    rf"(?P<repository>{_PART}(?:/{_PART})*)(?::(?P<tag>[A-Za-z0-9_][\w.-]{{0,127}}))?", re.A
)
_IMPLIED = ("index.docker.io/", "docker.io/", "library/")
_LONGEST_FILE = 255
_DIGEST = re.compile(r"[0-9a-f]{64}")


def normalise(name: str) -> str:
    """Return the name with its tag, `debian` → `debian:latest`.

    Raises:
        InvalidRequestError: not a name; the message says what one looks like.
    """
    match = _NAME.fullmatch(name)
    if match is None or len(name) > 200 or digest_of(name) is not None:
        raise InvalidRequestError(
            f"{excerpt(name)} is not an image name: write repository[:tag] in lower case, "
            "for example debian:bookworm or team/tool:1.2"
        )
    full = f"{match['repository']}:{match['tag'] or 'latest'}"
    if len(file_name(full)) > _LONGEST_FILE:
        raise InvalidRequestError(f"{excerpt(name)} is too long, or has too many / in it")
    return full


def reference(text: str) -> tuple[str, str | None]:
    """Read how a Dockerfile names an image; return its name, and its digest if it is pinned.

    The registry that is meant when none is named is taken away: `docker.io/library/python` is
    `python:latest`. Another registry stays part of the name.

    Raises:
        InvalidRequestError: it is none.
    """
    name, at, digest = text.partition("@")
    for prefix in _IMPLIED:
        name = name.removeprefix(prefix)
    if at and (not digest.startswith("sha256:") or digest_of(digest) is None):
        raise InvalidRequestError(
            f"{excerpt(text)}: the digest after @ is not sha256:<64 hex digits>"
        )
    return normalise(name), digest_of(digest) if at else None


def digest_of(text: str) -> str | None:
    """Return the 64 hex digits of `sha256:<hex>` or `<hex>`; None when it is not a digest."""
    digits = text.removeprefix("sha256:")
    return digits if _DIGEST.fullmatch(digits) else None


def file_name(name: str) -> str:
    """Return a file name for a normalised name: no `/`, and different for different names."""
    return name.replace("/", "%2F") + ".json"
