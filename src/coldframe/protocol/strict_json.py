"""JSON that somebody else may have written, read so that it means one thing only."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 100
_NESTING = frozenset({dict, list})


class NotStrictError(ValueError):
    """What is wrong, as the predicate of a sentence about the file."""


def parse(content: str | bytes, *, depth: int = MAX_DEPTH) -> Any:
    """Return the value.

    Raises:
        NotStrictError: it is no JSON, names a key twice, holds NaN or an infinity, or is nested
            over `depth` levels deep.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_object,
        )
    except UnicodeError:
        raise NotStrictError("holds text that is no Unicode") from None
    except NotStrictError:
        raise
    except (ValueError, RecursionError):
        raise NotStrictError("is not JSON") from None
    if _too_deep(value, depth):
        raise NotStrictError(f"is nested over {depth} levels deep")
    return value


def _no_constant(name: str) -> NoReturn:
    raise NotStrictError(f"holds {name}, which is not finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise NotStrictError(f"holds the number {text[:40]}, which is not finite")
    return value


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(items)
    if len(value) != len(items):
        names = Counter(name for name, _ in items)
        raise NotStrictError(f"holds the key {names.most_common(1)[0][0][:40]!r} more than once")
    return value


def _too_deep(value: Any, depth: int) -> bool:
    level = [value] if type(value) in _NESTING else []
    for _ in range(depth):
        inside = (one.values() if type(one) is dict else one for one in level)
        # First by type alone: most hold thousands of numbers.
        nesting = (many for many in inside if not _NESTING.isdisjoint(map(type, many)))
        level = [one for many in nesting for one in many if type(one) in _NESTING]
        if not level:
            return False
    return True
