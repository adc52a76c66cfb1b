"""Text on its way to a sandbox, and into messages."""

from __future__ import annotations

from coldframe.protocol.errors import InvalidRequestError


def encoded(text: str | bytes, what: str) -> bytes:
    """Return text as UTF-8 with surrogate escapes, bytes as they are.

    Raises:
        InvalidRequestError: it cannot be encoded, as half of a surrogate pair, which models write.
    """
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not text that can be encoded: {error}") from error


def excerpt(text: str | bytes, most: int = 200) -> str:
    """Return what somebody else has written as a message quotes it: its first `most` characters."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text)} characters)"


def lacking(what: str, error: Exception, extra: str) -> str:
    """Say that this installation cannot do something, and which extras of ours bring what it lacks.

    From a clone: Coldframe is on no package index.
    """
    return f"{what} lacks a library ({error}): pip install '/path/to/clone[{extra}]'"
