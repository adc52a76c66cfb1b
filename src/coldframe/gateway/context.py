"""What every route needs: the service, the caller's view of the node, bodies, bounded waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote_to_bytes
from weakref import WeakSet

from fastapi import Header, Path, Query
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response

from coldframe.gateway.health import HealthCheck
from coldframe.gateway.identity import Identity, Scope
from coldframe.gateway.lasting import LOST
from coldframe.gateway.meters import Meters
from coldframe.gateway.protocol import WHOLE
from coldframe.gateway.settings import GatewaySettings
from coldframe.gateway.tenants import Quotas, Tenant
from coldframe.gateway.tickets import Tickets
from coldframe.node.node import Node
from coldframe.node.shares import Shares
from coldframe.protocol import wire
from coldframe.protocol.errors import (
    InvalidRequestError,
    TooLargeError,
    TooSlowError,
)
from coldframe.protocol.ids import OPERATION_PATTERN
from coldframe.protocol.wire import LONGEST_POLL_S

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

WaitSeconds = Annotated[
    float,
    Query(ge=0, le=LONGEST_POLL_S, description="Seconds that the answer may be waited for."),
]
DEFAULT_WAIT_S = 30.0
"""How long the end of a command is waited for where nothing is said."""
ExpectedVersion = Annotated[
    int | None, Query(description="Refuse with 409 if the sandbox is at another version.")
]


_OPERATION = {"pattern": OPERATION_PATTERN}
OperationId = Annotated[
    str, Path(description="The command's operation id.", json_schema_extra=_OPERATION)
]
IdempotencyKey = Annotated[
    str | None, Header(description="The operation id of a create.", json_schema_extra=_OPERATION)
]


class Polls:
    """Requests that wait; a stop lets all of them answer at once."""

    def __init__(self) -> None:
        self._waiting: WeakSet[asyncio.Timeout] = WeakSet()
        self._late: dict[Callable[[], None], float] = {}
        """When each is called."""
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = False
        """Whether nobody is to wait any more."""

    def bound(self, seconds: float) -> asyncio.Timeout:
        """Raise TimeoutError in a block that takes longer, or when the service stops."""
        timeout = asyncio.timeout(0 if self.stopped else seconds)
        self._waiting.add(timeout)
        return timeout

    def call_late(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back in so long, or when the service stops; unless it is forgotten before.

        Most are forgotten soon, so there is one timer for all.
        """
        when = asyncio.get_running_loop().time() + (0 if self.stopped else seconds)
        self._late[callback] = when
        if self._timer is None or when < self._timer.when():
            self._set_timer(when)

    def forget(self, callback: Callable[[], None]) -> None:
        """Do not call back. Twice is fine."""
        self._late.pop(callback, None)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._call)

    def _call(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for callback in [one for one, when in self._late.items() if when <= now]:
            self.forget(callback)
            callback()
        if self._late:
            self._set_timer(min(self._late.values()))

    def stop(self) -> None:
        """Let everybody answer now, and nobody wait any more."""
        self.stopped = True
        now = asyncio.get_running_loop().time()
        self._late = dict.fromkeys(self._late, now)
        self._set_timer(now)
        for timeout in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # its block has ended
                timeout.reschedule(now)


@dataclass
class Service:
    """What the application serves with."""

    node: Node
    quotas: Quotas
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    meters: Meters = field(default_factory=Meters)
    polls: Polls = field(default_factory=Polls)
    health: HealthCheck = field(init=False)
    tickets: Tickets = field(init=False)
    answers: Shares = field(init=False)
    """Large answers that are on their way."""
    patching: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Patches are worked out here, in memory: so many at once."""
    origin: str | None = None
    """Where it listens on TCP, such as `http://127.0.0.1:8080`."""

    def __post_init__(self) -> None:
        self.health = HealthCheck(self.node, self.settings.health_s)
        self.tickets = Tickets(self.node.settings.home)
        self.answers = Shares(self.settings.answer_bytes, "large answers")


def service_of(request: HTTPConnection) -> Service:
    """Return the service that a request came to."""
    service: Service = request.app.state.service
    return service


def enter(request: HTTPConnection, scope: Scope) -> Tenant:
    """Return the node as the caller sees it.

    Raises:
        NotPermittedError: the caller's key lacks the scope.
    """
    return tenant_of(service_of(request), request.state.identity, scope)


def tenant_of(service: Service, identity: Identity, scope: Scope) -> Tenant:
    """Return the node as this caller sees it. Raises as `enter`."""
    identity.require(scope)
    return Tenant(service.node, identity, service.quotas)


async def body_bytes(request: Request) -> bytes:
    """Return a body that fits in memory.

    Raises:
        TooLargeError: it does not.
        TooSlowError: it does not come.
    """
    settings = service_of(request).settings
    limit = settings.json_bytes
    if int(request.headers.get("content-length") or 0) > limit:
        raise TooLargeError(f"a body of at most {limit} bytes is taken here; stream files instead")
    if WHOLE in request.scope:
        return require_small(await request.body(), limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_s) as patience:
            begun = patience.when() or 0.0
            async for piece in request.stream():
                size += len(piece)
                pieces.append(require_small(piece, limit - size + len(piece)))
                if piece:
                    patience.reschedule(begun + size / settings.body_bytes_per_s)
    except TimeoutError:
        raise TooSlowError(
            f"of the body only {size} bytes came in time: {settings.body_s:g} s, and "
            f"{settings.body_bytes_per_s:g} bytes a second"
        ) from None
    return b"".join(pieces)


def require_small(data: bytes, most: int) -> bytes:
    """Return what is at most so large.

    Raises:
        TooLargeError: it is larger.
    """
    if len(data) > most:
        raise TooLargeError("this body is larger than what is held in memory; stream files instead")
    return data


async def body(request: Request, kind: type[M]) -> M:
    """Return a JSON body as a model.

    Raises:
        TooLargeError, InvalidRequestError: it is too large, or none.
    """
    return wire.load(kind, await body_bytes(request))


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """Say in the OpenAPI document that a route takes this kind of body."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref(kind)}},
        }
    }


def ref(kind: type[BaseModel]) -> dict[str, str]:
    """Point to a model's schema in the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


RAW_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
"""Says in the OpenAPI document that a route takes bytes."""


def json_answer(model: BaseModel, status: int = 200) -> Response:
    """Answer with a model."""
    return Response(wire.dump(model), status, media_type="application/json")


def json_list(models: Iterable[BaseModel]) -> Response:
    """Answer with an array of models."""
    return Response(wire.dump_all(models), media_type="application/json")


def raw_query(request: HTTPConnection, name: str) -> str | bytes:
    """Return a parameter that may be bytes that are no UTF-8, percent-encoded.

    Raises:
        InvalidRequestError: it is missing.
    """
    for found in raw_queries(request, name):
        try:
            return found.decode()
        except UnicodeDecodeError:
            return found
    raise InvalidRequestError(f"the parameter {name!r} is missing")


def raw_queries(request: HTTPConnection, name: str) -> Iterator[bytes]:
    """Yield every value of a parameter, in the order of the query."""
    for part in request.scope["query_string"].split(b"&"):
        key, equals, value = part.partition(b"=")
        if equals and key == name.encode("ascii"):
            yield unquote_to_bytes(value.replace(b"+", b" "))


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; when the client goes away first, cancel it.

    Only once the body has been read.

    Raises:
        ClientDisconnect: it has gone; nobody reads an answer.
    """
    async with until_one_ends(work, _disconnect(request)) as (task, _):
        if not task.done():
            raise ClientDisconnect
        result: T = task.result()
        return result


@contextlib.asynccontextmanager
async def until_one_ends(
    *works: Coroutine[Any, Any, Any],
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run several at once and enter when the first has ended; the others end at the exit."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hung_up(scope: Mapping[str, Any]) -> None:
    """Return once the connection of a request or WebSocket is lost.

    Who waits until a sandbox takes what the client has sent hears of it by no message.
    """
    await scope[LOST].wait()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
