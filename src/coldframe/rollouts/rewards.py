"""Read a reward file strictly: a finite number, or a flat map of them, or a typed failure.

The bytes come out of a sandbox and decide what a policy learns, so nothing is coerced: no
boolean, text, NaN or infinity is a number, and "nothing there" is not 0.
"""

from __future__ import annotations

import math
import re
from typing import Any

from coldframe.protocol import strict_json
from coldframe.protocol.errors import RewardInvalidError
from coldframe.protocol.text import excerpt

MAX_REWARD_BYTES = 64 * 1024
MAX_PARTS = 256
MAX_NAME = 200
SHOWN = 40
"""Characters of what a reward holds, in messages."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parse_reward(content: bytes, path: str) -> dict[str, float]:
    """Return the rewards by part; a lone number is the part `reward`.

    Args:
        path: names the file in messages; one that ends in `.json` is JSON, any other text.
    Raises:
        RewardInvalidError: the content is anything else than a finite number or, in JSON, a
            flat map of them.
    """
    if len(content) > MAX_REWARD_BYTES:
        raise RewardInvalidError(f"{path}: {len(content)} bytes, over {MAX_REWARD_BYTES}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise RewardInvalidError(f"{path}: not UTF-8") from None
    if not text.strip():
        raise RewardInvalidError(f"{path}: empty")
    return _json(text, path) if path.endswith(".json") else {"reward": _text(text, path)}


def _text(text: str, path: str) -> float:
    word = text.strip(" \t\r\n")
    if _NUMBER.fullmatch(word) is None:
        raise RewardInvalidError(f"{path}: {excerpt(word, SHOWN)} is not a number")
    return _finite(float(word), path, "the number")


def _json(text: str, path: str) -> dict[str, float]:
    try:
        value = strict_json.parse(text)
    except strict_json.NotStrictError as error:
        raise RewardInvalidError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        return {"reward": _number(value, path, "the value")}
    if not 1 <= len(value) <= MAX_PARTS:
        raise RewardInvalidError(_too_many(len(value), path))
    return {
        _name(key, path): _number(part, path, excerpt(key, SHOWN)) for key, part in value.items()
    }


def _too_many(count: int, path: str) -> str:
    return f"{path}: a map of {count} parts; 1 to {MAX_PARTS} are read"


def _name(key: str, path: str) -> str:
    if not key or len(key) > MAX_NAME or any("\ud800" <= one <= "\udfff" for one in key):
        raise RewardInvalidError(f"{path}: {excerpt(key, SHOWN)} cannot name a part")
    return key


def _number(value: Any, path: str, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = "null" if value is None else type(value).__name__
        raise RewardInvalidError(f"{path}: {what} is of type {kind}, not a number")
    try:
        return _finite(float(value), path, what)
    except OverflowError:
        raise RewardInvalidError(f"{path}: {what} is not finite") from None


def _finite(value: float, path: str, what: str) -> float:
    if not math.isfinite(value):
        raise RewardInvalidError(f"{path}: {what} is not finite")
    return value
