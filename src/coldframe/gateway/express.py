"""The one route that is asked for per command, past the router: that costs as much as the command.

The same function answers, in the moment the result is known: each turn of the event loop in between
costs, too. The router has it too, for the document and for what does not match here.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coldframe.gateway import failures
from coldframe.gateway.context import DEFAULT_WAIT_S
from coldframe.gateway.execs import run
from coldframe.gateway.routes import KNOWN
from coldframe.protocol.errors import ColdframeError

_TEMPLATE = "/v1/sandboxes/{sandbox_id}/execs"
_PATH = re.compile(r"/v1/sandboxes/([A-Za-z0-9._-]+)/execs")
_QUERY = re.compile(rb"(?:wait_s=([0-9]{1,2}))?")


class Express:
    """An application with a shorter way to `run`."""

    def __init__(self, app: ASGIApp, state: object) -> None:
        """Take an application and what its requests find as `request.app`."""
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a command that is submitted in the usual form, or pass the request on."""
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = _PATH.fullmatch(scope["path"])
        query = found and _QUERY.fullmatch(scope["query_string"])
        wait_s = float(query[1] or DEFAULT_WAIT_S) if query else 0.0
        if found is None or query is None or wait_s > DEFAULT_WAIT_S:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._state
        scope["path_params"] = {"sandbox_id": found[1]}
        scope[KNOWN] = _TEMPLATE
        request = Request(scope, receive, send)
        early = _Early(scope, receive, send)
        try:
            response = await run(request, found[1], wait_s, early.answer)
        except ColdframeError as error:
            response = await failures.answer_to(request, error)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - as the application's own last handler
            response = failures.answer_fault(request, error)
        if early.sending is None:
            await response(scope, receive, send)
        else:
            await early.sending


class _Early:
    """An answer that is sent by whoever has it, as far as that goes without waiting."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._to = (scope, receive, send)
        self.sending: Awaitable[None] | None = None
        """What is left to be waited for; None: nothing was sent."""

    def answer(self, response: Response) -> None:
        """Send it, or begin to."""
        work = response(*self._to)
        try:
            waits_for = work.send(None)
        except StopIteration:
            self.sending = _nothing()
        else:
            self.sending = _rest(work, waits_for)


async def _nothing() -> None:
    pass


@types.coroutine
def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that was begun outside of a task, in the task that awaits this."""
    with contextlib.suppress(StopIteration):
        while True:
            try:
                got = yield waits_for
            except BaseException as error:  # noqa: BLE001 - is thrown where it belongs
                waits_for = work.throw(error)
            else:
                waits_for = work.send(got)
