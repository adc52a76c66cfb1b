"""Ids: random, short, and a sandbox's id names its node.

A router can find a sandbox's node from the id alone, so it needs no database.
"""

from __future__ import annotations

import re
import secrets

from coldframe.protocol.errors import InvalidRequestError

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
OPERATION_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"
"""What an operation id looks like, in the dialect of JSON Schema."""
_OPERATION = re.compile(OPERATION_PATTERN)


_CHARACTERS = bytes(ord(_ALPHABET[byte & 31]) for byte in range(256))
"""Which character a random byte stands for."""


def _random(length: int) -> str:
    return secrets.token_bytes(length).translate(_CHARACTERS).decode()


def new_node_id() -> str:
    """Six characters, unique among the nodes of a deployment."""
    return _random(6)


def new_sandbox_id(node_id: str) -> str:
    """`sb-<node>-<random>`: 50 random bits."""
    return f"sb-{node_id}-{_random(10)}"


def new_operation_id() -> str:
    """`op-<random>`: 80 random bits."""
    return f"op-{_random(16)}"


def check_operation_id(operation_id: str) -> str:
    """Return the id itself if it may be used.

    Raises:
        InvalidRequestError: empty, over 128 characters, or with other than [A-Za-z0-9._:-].
    """
    if not isinstance(operation_id, str) or _OPERATION.fullmatch(operation_id) is None:
        raise InvalidRequestError(
            f"operation id {operation_id!r:.160}: 1 to 128 characters of [A-Za-z0-9._:-]"
        )
    return operation_id
