"""Records that are written once: whole, read-only, and never written over."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.store import written_beside


def canonical(value: Any) -> bytes:
    """Return a value as JSON in the one form that is digested: sorted, no spaces, ASCII.

    Raises:
        ValueError: it holds NaN or an infinity.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def write_frozen(path: Path, content: bytes) -> None:
    """Write a file that is read-only and did not exist before; the same content again is fine.

    Raises:
        InvalidRequestError: it exists with other content.
    """
    with (
        written_beside(path, content, mode=0o444) as made,
        contextlib.suppress(FileExistsError),
    ):
        os.link(made, path)
        return
    refuse_other(path, content)


def refuse_other(path: Path, content: bytes) -> None:
    """Raise InvalidRequestError if a file exists with other content."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() != content:
            raise InvalidRequestError(f"{path}: is frozen with other content; choose another name")
