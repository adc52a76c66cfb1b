"""Where on a machine its node is found: files of a home that clients and the node agree on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LONGEST_ADDRESS = 107
"""Bytes of a path that fit into the address of a unix socket."""
DEFAULT_HOME = Path("/var/lib/coldframe")
"""Where images and state are, unless COLDFRAME_HOME says otherwise."""


def socket_of(home: Path) -> Path:
    """The unix socket of the machine's node."""
    return home / "node.sock"


def start_lock_of(home: Path) -> Path:
    """Locked by whoever starts the machine's node, until it is up."""
    return home / "node.starting"


def log_of(home: Path) -> Path:
    """What a node that a client started has to say."""
    return home / "node.log"


@contextlib.contextmanager
def address_of(socket: Path) -> Iterator[str]:
    """A path to a unix socket that fits into an address, for a block; any home has one.

    Raises:
        OSError: it is too long, and its directory is not there.
    """
    if len(os.fsencode(socket)) <= _LONGEST_ADDRESS:
        yield str(socket)
        return
    directory = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{socket.name}"
    finally:
        os.close(directory)
