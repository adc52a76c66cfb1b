"""Where on a machine its node is found: files of a home that clients and the node agree on."""

from __future__ import annotations

from pathlib import Path

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
