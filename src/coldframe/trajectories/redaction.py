"""Keep secrets out of what is written down.

Two ways, together: names that look secret hide their values wherever they stand, and values
that are known to be secret (an API key, a resolved environment value) are taken out of any
text or output, whoever printed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import Any
from urllib.parse import urlsplit, urlunsplit

REDACTED = "[redacted]"
MIN_SECRET_LENGTH = 6
"""Shorter values are not searched for: they would turn up by chance and mangle the record."""

_SECRET_NAME = re.compile(
    r"(^|[_.-])(api[_-]?key|key|token|secret|passw(or)?d|passphrase|pwd|credentials?|auth|"
    r"authorization|bearer|cookie|private|dsn|signature)s?($|[_.-])|apikey|accesskey|"
    r"secretkey|password|privatekey",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"^(api_key_env|max_.*tokens?|.*_tokens|tokens|tokenizer)$", re.IGNORECASE)
_USERINFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^/\s'\"]{1,1024})@")
_ASSIGNMENT = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]{0,63})=([^\s;&|'\"]+|'[^']*'|\"[^\"]*\")")


def is_secret_name(name: str) -> bool:
    """Whether a variable or field of this name is expected to hold a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.match(name)


def redact_url(url: str) -> str:
    """Return the URL without its password and without secret query values."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return _USERINFO.sub(rf"\1{REDACTED}@", url)
    netloc = parts.netloc
    if "@" in netloc:
        netloc = f"{REDACTED}@{netloc.rpartition('@')[2]}"
    pairs = [pair.partition("=") for pair in parts.query.split("&")] if parts.query else []
    query = "&".join(
        f"{name}={REDACTED}" if equals and is_secret_name(name) else f"{name}{equals}{value}"
        for name, equals, value in pairs
    )
    return urlunsplit((parts.scheme, netloc, parts.path, query, parts.fragment))


class Redactor:
    """Removes what it knows to be secret from text, bytes and JSON values."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        found = {one for one in secrets if len(one) >= MIN_SECRET_LENGTH}
        # Longest first: a secret that contains another must not leave its ends behind.
        self._text = sorted(found, key=len, reverse=True)
        self._bytes = [one.encode("utf-8", "surrogateescape") for one in self._text]

    def text(self, value: str) -> str:
        """Return text without known secrets, URL passwords and `SECRET_NAME=value` words."""
        for secret in self._text:
            value = value.replace(secret, REDACTED)
        value = _USERINFO.sub(rf"\1{REDACTED}@", value)
        return _ASSIGNMENT.sub(self._assignment, value)

    @staticmethod
    def _assignment(match: re.Match[str]) -> str:
        if not is_secret_name(match.group(1)) or match.group(2).startswith("$"):
            return match.group(0)
        return f"{match.group(1)}={REDACTED}"

    def output(self, value: bytes) -> bytes:
        """Return bytes without known secrets; nothing else is touched, output is evidence."""
        for secret in self._bytes:
            value = value.replace(secret, REDACTED.encode())
        return value

    def found_in(self, value: bytes | mmap) -> bool:
        """Whether a known secret stands in there."""
        return any(value.find(secret) != -1 for secret in self._bytes)

    def environment(self, env: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the environment with the values of secret names hidden."""
        return {
            name: REDACTED if value and is_secret_name(name) else value and self.text(value)
            for name, value in env.items()
        }

    def json(self, value: Any, *, name: str = "") -> Any:
        """Return a JSON value, redacted all the way down."""
        if isinstance(value, dict):
            return {key: self.json(item, name=str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(item, name=name) for item in value]
        if isinstance(value, str):
            return REDACTED if value and is_secret_name(name) else self.text(value)
        return value


def secret_values(env: Mapping[str, str]) -> set[str]:
    """Return the values in an environment whose names look secret."""
    return {value for name, value in env.items() if is_secret_name(name) and value}
