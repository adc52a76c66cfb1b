"""What runs sandboxes: a seam with one file per backend.

A backend is one module and one line of `RUNTIMES`; others' come by the entry point group
`coldframe.runtimes`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from coldframe.protocol.errors import InvalidRequestError

__all__ = ["ENTRY_POINTS", "RUNTIMES", "load", "names"]

ENTRY_POINTS = "coldframe.runtimes"
RUNTIMES = {
    "fake": "coldframe.runtimes.fake:FakeRuntime",
    "native": "coldframe.runtimes.native:NativeRuntime",
}


def names() -> tuple[str, ...]:
    """Every runtime that can be asked for."""
    found = {point.name for point in entry_points(group=ENTRY_POINTS)}
    return tuple(sorted(found | RUNTIMES.keys()))


def load(name: str) -> Any:
    """Return the class of a runtime; what it takes is its own.

    Raises:
        InvalidRequestError: there is none of that name, or it cannot be imported.
    """
    target = RUNTIMES.get(name)
    if target is None:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            return _imported(point.value, name)
        raise InvalidRequestError(f"runtime {name!r} is not known: {', '.join(names())}")
    return _imported(target, name)


def _imported(target: str, name: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"runtime {name!r} cannot be loaded: {error}") from error
