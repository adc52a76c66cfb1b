"""How long the latest of something took, for whoever watches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

_WINDOW = 2048
_QUANTILES = (0.5, 0.95, 0.99)


class Durations:
    """How long the latest of something took."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self.count = 0
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Note one."""
        self._latest.append(seconds)
        self.count += 1
        self.sum += seconds

    def quantiles(self) -> Iterator[tuple[float, float]]:
        """Yield quantiles of the latest 2,048; none when there was none."""
        ordered = sorted(self._latest)
        for quantile in _QUANTILES if ordered else ():
            yield quantile, ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]
