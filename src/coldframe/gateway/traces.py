"""The trace that a request belongs to: set for all that is done for it, told in log and answer.

Where OpenTelemetry is configured (`opentelemetry-instrument coldframe serve`, extra `otel`), each
request is a span of that trace, too.
"""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldframe.gateway.routes import Routes
from coldframe.protocol import tracing

_HEADER = tracing.HEADER.encode()
_ANSWERS = frozenset({"http.response.start", "websocket.http.response.start"})
_HEADS = _ANSWERS | {"websocket.accept"}


def traced(app: ASGIApp, routes: Routes) -> ASGIApp:
    """Return an application that does each request under its trace."""
    tracer = find_tracer()
    return Traced(app if tracer is None else Spans(app, routes, tracer))


class Traced:
    """Takes the trace from the header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        # The task is this request's alone; so is its context.
        tracing.enter(given_trace(scope))
        await self._app(scope, receive, _telling(send))


class Spans:
    """Makes a span of each request."""

    def __init__(self, app: ASGIApp, routes: Routes, tracer: Any) -> None:
        self._app, self._routes, self._tracer = app, routes, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        given = _given(scope)
        parent = extract({} if given is None else {tracing.HEADER: given})
        route, sandbox = self._routes.find(scope)
        method = scope.get("method", "WEBSOCKET")
        told = {"http.request.method": method, "http.route": route}
        if sandbox:
            told["coldframe.sandbox_id"] = sandbox
        with self._tracer.start_as_current_span(
            f"{method} {route}", parent, SpanKind.SERVER, told
        ) as span:
            telling = _telling(send)

            async def noted(message: Message) -> None:
                if message["type"] in _ANSWERS:
                    span.set_attribute("http.response.status_code", message["status"])
                await telling(message)

            await self._app(scope, receive, noted)


def _telling(send: Send) -> Send:
    """Return a `send` that names the trace of this moment in the answer's head."""
    # Now: an answer may be sent by whoever has it first, in a context that is another request's.
    trace = tracing.traceparent()
    if trace is None:
        return send

    async def told(message: Message) -> None:
        if message["type"] in _HEADS:
            headers = [*message.get("headers", ())]
            if all(name != _HEADER for name, _ in headers):  # else the request's span has said it
                headers.append((_HEADER, trace.encode()))
            message = {**message, "headers": headers}
        await send(message)

    return told


def given_trace(scope: Scope) -> str | None:
    """Return the trace id that a request names; None: none that is valid."""
    given = _given(scope)
    return None if given is None else tracing.read(given)


def _given(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _HEADER:
            found: str = value.decode("latin-1")
            return found
    return None


def find_tracer() -> Any:
    """Return what makes spans; None: nobody has configured where they go."""
    trace = sys.modules.get("opentelemetry.trace")  # by whoever configures it, before us
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return trace.get_tracer("coldframe")
