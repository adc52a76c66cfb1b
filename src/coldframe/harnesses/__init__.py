"""Agent harnesses, one file each, found by name.

A name maps to a dotted path and is imported when it is asked for, so that one harness's
dependencies are nobody else's. Third parties add theirs through the entry point group
`coldframe.harnesses`, or are named as `package.module:Class`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from coldframe.harnesses.base import (
    Ending,
    Episode,
    Harness,
    Limits,
    McpServer,
    ModelSettings,
    Offers,
    Outcome,
    Solution,
)
from coldframe.protocol.errors import InvalidRequestError

__all__ = [
    "Ending",
    "Episode",
    "Harness",
    "Limits",
    "McpServer",
    "ModelSettings",
    "Offers",
    "Outcome",
    "Solution",
    "harness_names",
    "load_harness",
]

HARNESSES = {
    "nop": "coldframe.harnesses.nop:NopHarness",
    "oracle": "coldframe.harnesses.oracle:OracleHarness",
    "react": "coldframe.harnesses.react:ReactHarness",
}
ENTRY_POINTS = "coldframe.harnesses"


def harness_names() -> tuple[str, ...]:
    """Return every name that `load_harness` knows."""
    return tuple(sorted({*HARNESSES, *(one.name for one in entry_points(group=ENTRY_POINTS))}))


def load_harness(name: str) -> Harness:
    """Import and make the harness of that name, or of that `package.module:Class`.

    Raises:
        InvalidRequestError: there is none, or it cannot be imported.
    """
    path = HARNESSES.get(name)
    if path is None:
        found = [one for one in entry_points(group=ENTRY_POINTS) if one.name == name]
        path = found[0].value if found else name if ":" in name else None
    if path is None:
        raise InvalidRequestError(
            f"no harness {name!r}; there are {', '.join(harness_names())}, "
            "or name one as package.module:Class"
        )
    module, _, attribute = path.partition(":")
    try:
        made: Harness = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"harness {name!r} cannot be imported: {error}") from error
    return made
