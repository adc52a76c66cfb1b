"""What counts as a number, and what can be written down as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value is a finite int or float, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_plain(value: object) -> bool:
    """Tell whether JSON can hold a value and give it back: finite, and no key that is no text."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_plain(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, str | bool) or is_number(value)
