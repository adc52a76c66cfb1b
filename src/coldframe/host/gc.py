"""Reap what nodes left behind that were killed: found from the kernel's and the disk's state alone.

A node is dead when nobody holds the flock on its lock file. A live node's things, and those of
nodes of another home, are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from coldframe.host import census, tally
from coldframe.host.reaping import reap_cgroups
from coldframe.host.removal import remove_tree
from coldframe.host.roottree import closing
from coldframe.protocol.errors import FileError

LOCK, DAEMON = "lock", "daemon"
"""Held as long as anything of a node lives; and as long as a process serves it, if it may outlive
that process."""
_FIRST = frozenset({LOCK, DAEMON, tally.FILE, "expired"})
_NODE_ID = re.compile(r"[0-9a-z]{6}")
_JUST_MADE_S = 5.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def reap_dead_nodes(home: Path) -> tuple[str, ...]:
    """Reap every dead node of a home; return what was reaped, a line each.

    Idempotent, and safe beside other calls of it. Blocks while what was killed ends (at most
    some seconds); run it in a thread beside an event loop.
    """
    reaped: list[str] = []
    for node_id, lock in _dead_nodes(home):
        with closing(lock):
            reaped += _reap_node(home, node_id)
    return tuple(reaped)


def hold_node(directory: Path, name: str = LOCK) -> int | None:
    """Make a node's directory and take its lock; None if somebody holds it already.

    Returns the descriptor that holds the lock until it, and each copy of it, is closed. Raises
    OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_held(path: Path) -> bool:
    """Whether somebody holds a lock of a node's directory. Raises OSError: there is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def node_ids(home: Path) -> tuple[str, ...]:
    """Ids of all nodes of a home, dead or alive."""
    try:
        names = sorted(path.name for path in (home / "nodes").iterdir() if not path.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(name for name in names if _NODE_ID.fullmatch(name) is not None)


def _dead_nodes(home: Path) -> Iterator[tuple[str, int]]:
    """Yield (node id, descriptor that holds its lock)."""
    for name in node_ids(home):
        path = home / "nodes" / name
        if being_made(path):
            continue
        with contextlib.suppress(OSError):  # reaped by somebody else meanwhile
            fd = hold_node(path)
            if fd is not None:
                yield name, fd


def being_made(path: Path) -> bool:
    """Whether a node is just starting there: nothing but perhaps its locks, and these are new."""
    try:
        others = [entry for entry in path.iterdir() if entry.name not in _FIRST]
        return not others and time.time() - path.stat().st_mtime < _JUST_MADE_S
    except OSError:
        return True


def _reap_node(home: Path, node_id: str) -> list[str]:
    state = home / "nodes" / node_id
    reaped = reap_cgroups(census.node_cgroups(node_id))
    scope = census.Scope(node_id, state)
    for point, description in list(census.mounts_of(scope)):
        if (
            subprocess.run(["umount", "--lazy", point], capture_output=True, check=False).returncode
            == 0
        ):
            reaped.append(description)
    pool = home / "pools" / f"{node_id}.img"
    if pool.exists():
        pool.unlink(missing_ok=True)
        reaped.append(f"pool {pool}")
    if left := census.node_cgroups(node_id):
        # By its directory the next call finds it.
        return [*reaped, f"node {node_id} in part only: what is in cgroup {left[0]} does not end"]
    return reaped + _reap_directory(state)


def _reap_directory(state: Path) -> list[str]:
    """Remove a node's directory, each upper a line; the lock goes last."""
    reaped = []
    uppers = state / "uppers"
    if uppers.is_dir():
        reaped += [f"upper {path}" for path in sorted(uppers.iterdir())]
    with closing(os.open(state.parent, _DIRECTORY)) as nodes:
        try:
            if uppers.is_dir():
                # First, as handing in the counts needs space, and the disk may be full of these.
                with closing(os.open(state, _DIRECTORY)) as own:
                    remove_tree(own, b"uppers")
            tally.hand_in(state.parent.parent, state)
            remove_tree(nodes, os.fsencode(state.name))
        except (OSError, FileError) as error:
            return [*reaped, f"directory {state} in part only: {error}"]
    return [*reaped, f"directory {state}"]
