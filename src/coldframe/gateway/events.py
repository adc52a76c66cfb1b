"""/v1/events: what happens to sandboxes, from a cursor on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from coldframe.gateway import failures
from coldframe.gateway.context import (
    Polls,
    WaitSeconds,
    enter,
    json_answer,
    service_of,
    unless_gone,
)
from coldframe.gateway.identity import Scope
from coldframe.protocol import wire
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import EventKind, EventPage

router = APIRouter(prefix="/v1/events", tags=["events"])

_Read = Callable[[str | None, int, bool], Coroutine[Any, Any, EventPage]]
"""From a cursor on, at most so many; whether to wait for one."""
_QUIET_S = 15.0
_MOST_EVENTS = 1000
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": EventPage,
        "content": {"text/event-stream": {}},
        "description": "In order; none within `wait_s`: an empty list.",
    }
}


@router.get("", response_model=None, responses=_EVENTS)
async def events(
    request: Request,
    *,
    cursor: Annotated[
        str | None,
        Query(description="`next_cursor` of before, or `oldest`. None: where to begin from now."),
    ] = None,
    kind: Annotated[
        EventKind, Query(description="Which events; each kind has cursors of its own.")
    ] = EventKind.STATE,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    wait_s: WaitSeconds = 0.0,
) -> Response:
    """Return events of the caller's sandboxes after a cursor; with `wait_s`, wait for one.

    Of kind `state` every transition, of `egress` every decision about the network, of `tamper`
    every refused attempt to write where a guard stood. The newest of each kind are kept.
    With `Accept: text/event-stream` as server-sent events that go on, from `Last-Event-ID` if it is
    there. A cursor whose events are kept no longer gets 410 `cursor_expired`, and `oldest`.
    """
    tenant = enter(request, Scope.READ)
    read = partial(tenant.events, kind)
    if "text/event-stream" in request.headers.get("accept", ""):
        begin = request.headers.get("last-event-id") or cursor
        first = await read(begin, limit, False)
        told = _told(read, service_of(request).polls, first)
        return StreamingResponse(told, 200, {"cache-control": "no-store"}, "text/event-stream")
    page = await read(cursor, limit, False)
    if page.events or wait_s == 0 or cursor is None:
        return json_answer(page)
    try:
        async with service_of(request).polls.bound(wait_s):
            return json_answer(await unless_gone(request, read(page.next_cursor, limit, True)))
    except TimeoutError:
        return json_answer(await read(page.next_cursor, limit, False))


async def _told(read: _Read, polls: Polls, page: EventPage) -> AsyncIterator[bytes]:
    while True:
        for event in page.events:
            yield b"event: %s\nid: %s\ndata: %s\n\n" % (
                event.kind.encode(),
                event.cursor.encode(),
                wire.dump(event),
            )
        try:
            async with polls.bound(_QUIET_S):
                page = await read(page.next_cursor, _MOST_EVENTS, True)
        except TimeoutError:
            if polls.stopped:
                return
            page = await read(page.next_cursor, _MOST_EVENTS, False)
            yield b": \n\n"  # shows that it lives
        except ColdframeError as error:
            body = json.dumps(wire.error_body(error, **failures.more_of(error))).encode()
            yield b"event: error\ndata: %s\n\n" % body
            return
