"""Tell what a connection's first bytes are, and which host they name. Pure; input is hostile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MOST_BYTES = 1 << 14
"""How much of a beginning is looked at; a longer one is refused."""
_MOST_RECORDS = 64

_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _HOST_NAME = 0, 0
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_BLANK = rb"[ \t\x0b\x0c\x1c-\x1f\x85\xa0]"
"""What some server takes for a space between a method and its target."""
_BEGINS = re.compile(rb"[\r\n]*" + _BLANK + rb"*" + _TOKEN + rb"*(?:" + _BLANK + rb"[^\r\n]*)?\Z")
"""Could still become a request line: a method, and anything behind a space."""
_LINE = re.compile(rb"[\r\n]*[^\r\n]+[\r\n]")
_HTTP = re.compile(rb"HTTP/", re.IGNORECASE)
_OLD_HTTP = re.compile(
    rb"[\r\n]*" + _BLANK + rb"*(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS)" + _BLANK + rb"+/"
)
"""Without a version; some servers read headers behind that all the same."""


class MalformedError(ValueError):
    """It begins like a protocol that we know and is not well formed."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a connection began with."""

    spoken: Literal["tls", "http", "http2", "tcp"]
    name: str | None = None
    """The host that TLS names; of HTTP requests, each names its own."""


def look(data: bytes, *, whole: bool = False) -> Opening | None:
    """Return what a beginning is, None while more is needed to tell (never if it is the whole).

    Raises:
        MalformedError: a TLS greeting that is broken, or longer than MOST_BYTES.
    """
    if len(data) > MOST_BYTES:
        raise MalformedError(f"its first {MOST_BYTES} bytes do not tell which host is meant")
    if data[:1] == b"\x16":
        opening = _look_tls(data)
        if opening is None and whole:
            raise MalformedError("its TLS greeting is cut short")
        return opening
    # A prefix must never be told otherwise than the whole: who waits in the middle of a line
    # would else be free to go on with any request.
    line = _LINE.match(data)
    if line is None and not whole:
        return None if _BEGINS.match(data) else Opening("tcp")
    text = data if line is None else line[0]
    if not (_BEGINS.match(text.rstrip(b"\r\n")) and (_HTTP.search(text) or _OLD_HTTP.match(text))):
        return Opening("tcp")
    return Opening("http2" if text.startswith(b"PRI ") else "http")


# --- TLS ------------------------------------------------------------------------------


class _Short(Exception):
    """More bytes are needed."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise _Short
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def _look_tls(data: bytes) -> Opening | None:
    if len(data) > 1 and data[1] != 3:
        return Opening("tcp")
    try:
        hello = _hello(data)
    except _Short:
        return None
    try:
        return Opening("tls", _server_name(hello))
    except _Short:
        raise MalformedError("its TLS greeting is broken") from None


def _hello(data: bytes) -> bytes:
    """Join the records that the first handshake message is cut into."""
    records, message = _Reader(data), b""
    for _ in range(_MOST_RECORDS):
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise MalformedError("its TLS greeting is none")
            size = int.from_bytes(message[1:4], "big")
            if size > MOST_BYTES:
                raise MalformedError("its TLS greeting is too long")
            if len(message) >= 4 + size:
                return message[4 : 4 + size]
        kind = records.number(1)
        records.take(2)
        part = records.vector(2)
        if kind != _HANDSHAKE or not part:
            raise MalformedError("its TLS greeting is broken")
        message += part
    raise MalformedError("its TLS greeting is cut into too many records")


def _server_name(hello: bytes) -> str | None:
    fields = _Reader(hello)
    fields.take(2 + 32)
    fields.vector(1)
    fields.vector(2)
    fields.vector(1)
    if not fields.left:
        return None
    extensions = _Reader(fields.vector(2))
    found: str | None = None
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        if found is not None:
            raise MalformedError("its TLS greeting names two hosts")
        names = _Reader(_Reader(content).vector(2))
        if names.number(1) != _HOST_NAME:
            raise MalformedError("its TLS greeting names no host")
        found = names.vector(2).decode("ascii", "replace")
        if names.left:
            raise MalformedError("its TLS greeting names two hosts")
    return found
