"""When a service looks for garbage, so that nobody waits for it.

By default what is kept for replays is looked through again and again: 36 µs of each command, and
pauses of up to 0.1 s for all that run. Here what outlives one look is taken out of the next ones;
all of it is looked through again after 25 million objects more, or when somebody calls
`gc.collect()`. What was alive at a look and became garbage in a cycle later stays until then;
commands make none.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

_THRESHOLDS = (2_000, 5, 2_500)
_OLDEST = 2


def look_once() -> None:
    """Look through what there is now, and then through each new object once."""
    gc.set_threshold(*_THRESHOLDS)
    gc.callbacks.append(_around_a_look)
    gc.collect()


def _around_a_look(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop":
        gc.freeze()
    elif info["generation"] == _OLDEST:
        gc.unfreeze()
