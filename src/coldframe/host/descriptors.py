"""Descriptors of this process: close them, and say typed when there is no room for another."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable

from coldframe.protocol.errors import CapacityError, Execution

_NO_ROOM = {
    errno.EMFILE: "this process has no descriptor left",
    errno.ENFILE: "this machine has no descriptor left",
    errno.ETOOMANYREFS: "too many descriptors of this process are on their way",
}


def close_all(descriptors: list[int]) -> None:
    """Close each descriptor of a list and empty it."""
    for fd in descriptors:
        os.close(fd)
    descriptors.clear()


def copy_all(descriptors: Iterable[int]) -> list[int]:
    """Descriptors of our own for the same files; all or, with OSError, none."""
    copies: list[int] = []
    try:
        for fd in descriptors:
            copies.append(os.dup(fd))
    except OSError:
        close_all(copies)
        raise
    return copies


def no_room(
    what: str, code: int = errno.EMFILE, *, execution: Execution = Execution.NOT_EXECUTED
) -> CapacityError:
    """The error that `what` could not be had for want of descriptors: the limit and the remedy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CapacityError(
        f"{what}: {_NO_ROOM[code]} (RLIMIT_NOFILE is {soft}, at most {hard}); "
        "raise it with `ulimit -n`, or keep fewer sandboxes and commands at once",
        execution=execution,
    )


class needing_room:
    """Turn the block's failures for want of descriptors into CapacityError."""

    def __init__(self, what: str, *, execution: Execution = Execution.NOT_EXECUTED) -> None:
        self._what, self._execution = what, execution

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise no_room(self._what, error.errno, execution=self._execution) from error
