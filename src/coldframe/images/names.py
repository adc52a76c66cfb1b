"""Names of images: `debian:bookworm`, `team/tool:1.2`; the tag is `latest` unless given."""

from __future__ import annotations

import re

from coldframe.protocol.errors import InvalidRequestError

_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_NAME = re.compile(
    rf"(?P<repository>{_PART}(?:/{_PART})*)(?::(?P<tag>[A-Za-z0-9_][\w.-]{{0,127}}))?", re.A
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def normalise(name: str) -> str:
    """Return the name with its tag, `debian` → `debian:latest`.

    Raises:
        InvalidRequestError: not a name; the message says what one looks like.
    """
    match = _NAME.fullmatch(name)
    if match is None or len(name) > 200 or digest_of(name) is not None:
        raise InvalidRequestError(
            f"{name!r} is not an image name: write repository[:tag] in lower case, "
            "for example debian:bookworm or team/tool:1.2"
        )
    return f"{match['repository']}:{match['tag'] or 'latest'}"


def digest_of(text: str) -> str | None:
    """Return the 64 hex digits of `sha256:<hex>` or `<hex>`; None when it is not a digest."""
    digits = text.removeprefix("sha256:")
    return digits if _DIGEST.fullmatch(digits) else None


def file_name(name: str) -> str:
    """Return a file name for a normalised name: no `/`, and different for different names."""
    return name.replace("/", "%2F") + ".json"
