"""What a sandbox's own authority is called, and the file in which OpenSSL looks for it."""

from __future__ import annotations

import hashlib

SUBJECT = "coldframe sandbox"
_COMMON_NAME = b"\x06\x03\x55\x04\x03"


def hashed_name() -> str:
    """Return the name by which OpenSSL finds our authority in a directory of certificates.

    The first half of a SHA-1 over the subject in its canonical form: no cryptography, but how
    OpenSSL names such files.
    """
    value = SUBJECT.lower().encode()
    pair = _COMMON_NAME + _der(0x0C, value)
    digest = hashlib.sha1(_der(0x31, _der(0x30, pair)), usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:4], 'little'):08x}.0"


def _der(tag: int, content: bytes) -> bytes:
    return bytes((tag, len(content))) + content
