"""Heads that a connection has sent before: the same bytes mean the same, and need no parser.

Whoever runs one command after the other sends the same head again and again, but for the length of
the body. Only what the bytes mean is kept, never what came of it: who asks is found out each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coldframe.gateway.exchange import Taker

_MOST_BYTES = 2048
_MOST = 8
_LENGTH = b"content-length"
_MARK = b"\r\nContent-Length: "
_END = b"\r\n\r\n"
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class _Known:
    take: Taker
    scope: dict[str, Any]
    """Without its state, and with the headers in a list that is nobody else's."""
    place: int
    """Of the length in the headers."""


class Heads:
    """The last heads of one connection."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: larger ones are for whoever bounds them."""
        self._most_bytes = min(most_bytes, _MOST_BYTES)
        self._known: dict[bytes, _Known] = {}

    def find(self, data: bytes) -> tuple[Taker, dict[str, Any], bytes] | None:
        """Return who takes a whole request, its scope without a state, and its body.

        None: it is not whole, or more than one, or its head is not known.
        """
        parts = self._split(data)
        known = self._known.get(parts[0]) if parts is not None else None
        if parts is None or known is None:
            return None
        _, digits, end = parts
        headers = known.scope["headers"].copy()
        headers[known.place] = (_LENGTH, digits)
        return known.take, {**known.scope, "headers": headers}, data[end:]

    def learn(self, data: bytes, take: Taker, scope: Mapping[str, Any]) -> None:
        """Keep what the parser made of a head, if `data` is one whole request with that head."""
        parts = self._split(data)
        if parts is None:
            return
        headers: list[tuple[bytes, bytes]] = [*scope["headers"]]
        if (_LENGTH, parts[1]) not in headers:
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        about = {name: value for name, value in scope.items() if name != "state"}
        place = headers.index((_LENGTH, parts[1]))
        self._known[parts[0]] = _Known(take, {**about, "headers": headers}, place)

    def _split(self, data: bytes) -> tuple[bytes, bytes, int] | None:
        """Return a head without the length that it tells, that length, and where the body begins.

        None: what follows the head is not so long.
        """
        end = data.find(_END, 0, self._most_bytes) + len(_END)
        at = data.find(_MARK, 0, end) + len(_MARK)
        if end < len(_END) or at < len(_MARK):
            return None
        stop = data.find(b"\r", at, end)
        digits = data[at:stop]
        if not digits.isdigit() or digits[:1] == b"0" or len(digits) > _MOST_DIGITS:
            return None
        if end + int(digits) != len(data):
            return None
        return data[:at] + data[stop:end], digits, end


def ends_with_message(data: bytes, *, whole: bool) -> bool:
    """Whether nothing follows the message that ends in `data`, as lines without content may.

    `whole`: it may have begun there.
    """
    return data[-1:] not in {b"\r", b"\n"} or (whole and data.find(_END) == len(data) - len(_END))
