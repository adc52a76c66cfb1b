"""The application: routes under /v1, errors as one kind of answer, the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, WebSocket, status
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute

import coldframe
from coldframe.gateway import (
    events,
    execs,
    failures,
    files,
    images,
    patches,
    ports,
    presence,
    sandboxes,
    service,
    sessions,
    streams,
)
from coldframe.gateway.context import Service
from coldframe.gateway.models import (
    ErrorBody,
    Lease,
    MakeDirectory,
    Mode,
    Ownership,
    PortUrlRequest,
    Signal,
)
from coldframe.gateway.routes import Routes
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    VersionMismatchError,
)
from coldframe.protocol.models import (
    DiskExtension,
    ExecRequest,
    GuardRequest,
    PtySize,
    SandboxSpec,
    SessionExecRequest,
    SessionRequest,
)
from coldframe.protocol.network import NetworkPolicy
from coldframe.protocol.text import excerpt
from coldframe.protocol.wire import VERSION_HEADER

_PARTS = (
    sandboxes,
    execs,
    streams,
    sessions,
    files,
    patches,
    ports,
    images,
    events,
    presence,
    service,
)
_BODIES = (
    SandboxSpec,
    ExecRequest,
    SessionRequest,
    SessionExecRequest,
    NetworkPolicy,
    DiskExtension,
    GuardRequest,
    PtySize,
    Lease,
    Signal,
    MakeDirectory,
    Mode,
    Ownership,
    PortUrlRequest,
)
_ROUTES: list[Any] = [route for part in _PARTS for route in part.router.routes]
_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "Refused or failed."}
}


def make_app(made: Service) -> FastAPI:
    """Return the application of a service. It knows callers only behind a `Guard`."""
    app = FastAPI(
        title="Coldframe",
        version=coldframe.__version__,
        description="Sandboxes of one node. Errors are `ErrorBody`; see its `code`.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to where Host says
        responses=_ERRORS,
    )
    app.state.service = made
    for part in _PARTS:
        app.include_router(part.router)
    app.add_api_websocket_route("/{path:path}", _refuse_socket)
    app.add_exception_handler(ColdframeError, _answer_ours)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(WebSocketRequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_fault)
    plain = app.openapi
    app.openapi = lambda: _with_bodies(plain())  # type: ignore[method-assign]
    return app


def routes(*others: BaseRoute) -> Routes:
    """Return every route, and others, to be looked up by what is asked for."""
    return Routes([*_ROUTES, *others])


def _with_bodies(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas of bodies that the routes read themselves, and drop what is never sent."""
    schemas = document["components"]["schemas"]
    for kind in _BODIES:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]  # none on the unix socket, and as long as none exists
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


async def _answer_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, ColdframeError)
    return await failures.answer_to(request, error)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestValidationError)
    return _invalid(error)


def _invalid(error: RequestValidationError | WebSocketRequestValidationError) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return failures.answer(InvalidRequestError(f"{where}: {first['msg']}"))


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is no such route", 405: "this route does not take that method"}
    words = f"{excerpt(request.url.path)}: {known.get(error.status_code, error.detail)}"
    refusal: ColdframeError = InvalidRequestError(words)
    if error.status_code in known and VERSION_HEADER in request.headers:
        # An SDK asks for nothing that there is not, unless it is of another time than we are.
        ours = f"Coldframe {coldframe.__version__} serves here"
        refusal = VersionMismatchError(f"{words}: {ours}; use the same version on both sides")
    told = failures.answer(refusal)
    headers = {**(error.headers or {})}
    if error.status_code == status.HTTP_405_METHOD_NOT_ALLOWED:
        # The router has looked at the first route of the path alone.
        taken = {
            method
            for route in _ROUTES
            if route.path_regex.match(request.url.path)
            for method in getattr(route, "methods", None) or ()
        }
        headers["Allow"] = ", ".join(sorted(taken))
    return Response(told.body, error.status_code, headers, "application/json")


async def _refuse_invalid(socket: WebSocket, error: Exception) -> None:
    assert isinstance(error, WebSocketRequestValidationError)
    await socket.send_denial_response(_invalid(error))


async def _refuse_socket(socket: WebSocket) -> None:
    """Where no route is, FastAPI would answer 403 and say nothing."""
    path = excerpt(socket.url.path)
    told = failures.answer(InvalidRequestError(f"{path}: there is no such route"))
    told.status_code = status.HTTP_404_NOT_FOUND
    await socket.send_denial_response(told)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client went away in the middle of its body: nobody reads this."""
    del request, error
    return Response(status_code=400)


async def _answer_fault(request: Request, error: Exception) -> Response:
    del request, error  # raised again, and logged, by whoever is outside
    return failures.fault()
