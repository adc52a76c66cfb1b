"""Errors as answers: which status each has, and what the log says."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from typing import Any, TypeVar

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from coldframe.gateway import identity
from coldframe.gateway.context import enter
from coldframe.gateway.protocol import BREAK_OFF
from coldframe.protocol import errors
from coldframe.protocol.errors import ColdframeError, Execution
from coldframe.protocol.wire import error_body

log = logging.getLogger("coldframe.gateway")

UNAUTHENTICATED = 401

E = TypeVar("E", bound=ColdframeError)

_STATUS: dict[type[BaseException], int] = {
    errors.ColdframeError: 500,
    errors.InvalidRequestError: 400,
    errors.VersionMismatchError: 400,
    errors.NotAuthenticatedError: UNAUTHENTICATED,
    errors.NotPermittedError: 403,
    errors.SandboxNotFoundError: 404,
    errors.OperationNotFoundError: 404,
    errors.ImageNotFoundError: 404,
    errors.PathNotFoundError: 404,
    errors.PortUrlInvalidError: 404,
    errors.TooSlowError: 408,
    errors.ConflictError: 409,
    errors.SandboxStateError: 409,
    errors.NameInUseError: 409,
    errors.OperationMismatchError: 409,
    errors.PathExistsError: 409,
    errors.StaleBaseError: 409,
    errors.PortUnreachableError: 409,
    errors.SessionEndedError: 409,
    errors.StdinClosedError: 409,
    errors.SandboxGoneError: 410,
    errors.OperationExpiredError: 410,
    errors.OutputNotKeptError: 410,
    errors.CursorExpiredError: 410,
    errors.TooLargeError: 413,
    errors.FileTooLargeError: 413,
    errors.NotExecutedError: 422,
    errors.UnsatisfiableError: 422,
    errors.FileError: 422,
    errors.ImageError: 422,
    errors.ImageDamagedError: 500,
    errors.CapacityError: 429,
    errors.CapabilityError: 501,
    errors.CreateError: 503,
    errors.SpawnerLostError: 503,
    errors.ClientClosedError: 503,
    errors.ServiceUnreachableError: 503,
    errors.StoreUnreachableError: 503,
    errors.StorageFullError: 507,
}
"""By class; one that is not here has that of the nearest class above it."""

_RETRY_AFTER_S = {429: "1", 503: "1", 507: "5"}


def retry_after(status: int) -> str | None:
    """Return after how many seconds a request of that status is worth another try."""
    return _RETRY_AFTER_S.get(status)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def more_of(error: BaseException) -> dict[str, Any]:
    """Return what an error's answer says besides its words."""
    return {"oldest": error.oldest} if isinstance(error, errors.CursorExpiredError) else {}


def discreet(error: ColdframeError) -> ColdframeError:
    """Return what a stranger may know of an error: where keys are is for the log alone."""
    if not isinstance(error, errors.StoreUnreachableError):
        return error
    log.warning("%s", error)
    return errors.StoreUnreachableError(
        "no key can be checked now: the service's store of keys does not answer; what runs goes "
        "on, try again when it is back"
    )


def in_words_of(caller: HTTPConnection, error: E) -> E:
    """Return an error with ids and names as its caller wrote them: without the owner's tag."""
    known: identity.Identity | None = getattr(caller.state, "identity", None)
    tag = known and known.tag
    if not tag or tag not in str(error):
        return error
    told = copy.copy(error)
    told.args = (str(error).replace(f"{tag}.", ""),)
    return told


def answer(error: ColdframeError, **more: Any) -> Response:
    """Return the answer that says an error; `more` stands beside it."""
    error = discreet(error)
    status = status_of(error)
    later = retry_after(status)
    headers = None if later is None else {"retry-after": later}
    # In ASCII: an error may name a file whose name is no text.
    told = json.dumps(error_body(error, **more_of(error), **more))
    return Response(told, status, headers, "application/json")


async def answer_to(request: Request, error: ColdframeError) -> Response:
    """Return the answer to a request; where it stood on what is no longer so, with what is."""
    more: dict[str, Any] = {}
    if isinstance(error, errors.ConflictError | errors.SandboxStateError):
        try:
            info = await enter(request, identity.Scope.READ).get(request.path_params["sandbox_id"])
            more["sandbox"] = info.model_dump(mode="json")
        except (ColdframeError, KeyError):
            pass  # the caller may not look, or there is nothing to see
    return answer(in_words_of(request, error), **more)


def note_fault(scope: Scope, error: BaseException) -> None:
    """Put a fault of ours into the log, whole."""
    log.error("%s %s failed", scope.get("method"), scope["path"][:200], exc_info=error)


def fault() -> Response:
    """Return the answer to a request that met a fault of ours: a sentence."""
    failed = ColdframeError("the service failed; its log says why", execution=Execution.UNKNOWN)
    response = answer(failed)
    # The server closes the connection of a fault: no client may send another request into it.
    response.headers["connection"] = "close"
    return response


def break_off(scope: Scope, error: ColdframeError) -> None:
    """Say why an answer ends that has begun, where its connection can say it."""
    end = scope.get(BREAK_OFF, lambda: None)()
    if end is not None:
        told = in_words_of(HTTPConnection(scope), error)
        end(json.dumps(error_body(told, **more_of(told))).encode("ascii"))


class Faultless:
    """An application whose faults are logged once, and answered as errors are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; answer what the application has failed to answer."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientDisconnected:
            raise  # no fault: the server knows what to do
        except asyncio.CancelledError:
            log.debug("%s was not answered: the service has ended", scope["path"][:200])
        except Exception as error:  # noqa: BLE001 - the last handler there is
            why = error if isinstance(error, ColdframeError) else error.__cause__
            if begun and isinstance(why, ColdframeError):
                # As a sandbox that ends while its files are read.
                log.warning("%s: the answer was cut short: %s", scope["path"], why)
                break_off(scope, why)
            else:
                note_fault(scope, error)
            if not begun:
                await fault()(scope, receive, send)
