"""One trace id from a task to the deletion of its last sandbox (W3C Trace Context).

The id travels in a context variable: whoever sets it sets it for all that it starts. Between
processes it is the header `traceparent`.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

HEADER = "traceparent"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_ID = re.compile(r"[0-9a-f]{32}")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16

_current: ContextVar[str | None] = ContextVar("coldframe_trace", default=None)


def new_trace_id() -> str:
    """32 hex digits, 128 random bits."""
    return secrets.token_hex(16)


def current() -> str | None:
    """Return the trace id of what runs now; None: nobody has given one.

    Where OpenTelemetry is in use and nothing else was set, that of its current span.
    """
    return _current.get() or _spans()[0]


def _spans() -> tuple[str | None, str | None]:
    """Trace and span id of OpenTelemetry's current span, if whoever embeds us has loaded it."""
    loaded = sys.modules.get("opentelemetry.trace")
    if loaded is None:
        return None, None
    context = loaded.get_current_span().get_span_context()
    if not context.is_valid:
        return None, None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def enter(trace_id: str | None) -> None:
    """Set the trace id of this task, or of this context."""
    _current.set(trace_id)


@contextmanager
def traced(trace_id: str) -> Iterator[None]:
    """Do a block under a trace id.

    Raises:
        ValueError: it is not 32 lower-case hex digits, or all zero.
    """
    if _ID.fullmatch(trace_id) is None or trace_id == _NO_TRACE:
        raise ValueError(f"trace id {trace_id[:64]!r}: 32 lower-case hex digits that are not all 0")
    token = _current.set(trace_id)
    try:
        yield
    finally:
        _current.reset(token)


def traceparent() -> str | None:
    """Return the header of a request that is made now; None: it belongs to no trace.

    It is a span of its own, or belongs to OpenTelemetry's current one.
    """
    given, (theirs, span) = _current.get(), _spans()
    trace_id = given or theirs
    if trace_id is None:
        return None
    if span is None or trace_id != theirs:
        span = secrets.token_hex(8)
    return f"00-{trace_id}-{span}-01"


def read(value: str) -> str | None:
    """Return the trace id of a header; None: it is not valid, and a trace begins anew."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == _NO_TRACE or match[2] == _NO_SPAN:
        return None
    if value.startswith("00-") and len(value) != 55:
        return None
    return match[1]
