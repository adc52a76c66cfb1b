"""What a forked child of this process lets go of, so that its parent's node stays the parent's.

A child of `fork` holds our locks, mounts, sockets and the epoll of our event loop, and nobody in
it serves them. Kept, they would outlive us: nothing of ours could be reaped before the child
ends. Used, they would steal what is ours. So the child closes them at once, and does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import weakref
from typing import Protocol


class Owner(Protocol):
    """Whatever holds descriptors that are not a child's."""

    def abandon(self) -> None:
        """In a forked child: close them, and tell nobody. To close it later does nothing."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def own(owner: Owner) -> None:
    """Let a forked child abandon what belongs to `owner`."""
    _owners.add(owner)


def own_socket(one: socket.socket) -> socket.socket:
    """Let a forked child close its copy of a socket; return the socket."""
    _sockets.add(one)
    return one


def own_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Let a forked child's copy of an event loop leave the epoll alone that it shares with ours."""
    _loops.add(loop)


def let_go() -> None:
    """Abandon everything, as a forked child does; also the last thing that a process may do."""
    for loop in _loops:
        # Closed by the garbage collector, the copy would take its descriptors out of our epoll.
        # asyncio has no public way to tell, or to change, what a loop selects with.
        if isinstance(getattr(loop, "_selector", None), selectors.BaseSelector):
            loop._selector = selectors.SelectSelector()  # type: ignore[attr-defined]
    for owner in list(_owners):
        with contextlib.suppress(Exception):  # one that was half made keeps no other's
            owner.abandon()
    for one in list(_sockets):
        with contextlib.suppress(OSError):
            one.close()
    _loops.clear()
    _owners.clear()
    _sockets.clear()


os.register_at_fork(after_in_child=let_go)
