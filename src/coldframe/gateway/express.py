"""The one request that is made per command, past the application: that costs more than the command.

What lets it in, answers and notes it is what the application is behind, called in a straight line.
What does not match goes there: another query, a body that comes later, a service that makes spans.
Why: docs/adr/0067-few-commands-at-once.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from coldframe.gateway import failures
from coldframe.gateway.activity import Activity
from coldframe.gateway.audited import Auditor
from coldframe.gateway.context import DEFAULT_WAIT_S, Service, require_small, tenant_of
from coldframe.gateway.exchange import Exchange
from coldframe.gateway.execs import running
from coldframe.gateway.guard import Admission, let_in, refusal, revoked, spoken
from coldframe.gateway.identity import Scope
from coldframe.gateway.large import result_answer
from coldframe.gateway.routes import KNOWN
from coldframe.gateway.tenants import Tenant
from coldframe.gateway.traces import given_trace
from coldframe.gateway.watch import Cut, Watch
from coldframe.protocol import tracing, wire
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import ExecRequest, ExecResult

_TRACE = tracing.HEADER.encode()
_TEMPLATE = "/v1/sandboxes/{sandbox_id}/execs"
_URL = re.compile(rb"/v1/sandboxes/([A-Za-z0-9._-]+)/execs(?:\?wait_s=([1-9][0-9]?))?")


@dataclass(frozen=True)
class Door:
    """What a request comes by: who is let in, and who takes note of it."""

    admit: Admission
    watch: Watch
    auditor: Auditor
    activity: Activity
    waits: bool
    """Whether letting in may take more than one step."""


class Express:
    """The short way by one door."""

    def __init__(self, app: FastAPI, door: Door) -> None:
        """`app` is what requests find as theirs."""
        self.app, self.door = app, door

    def __call__(self, url: bytes) -> Callable[[Exchange], None] | None:
        """Return what takes a POST to this path and query; None: the application does."""
        found = _URL.fullmatch(url)
        if found is None:
            return None
        wait_s = float(found[2] or DEFAULT_WAIT_S)
        if wait_s > DEFAULT_WAIT_S:
            return None
        return partial(self._take, found[1].decode("ascii"), wait_s)

    def _take(self, sandbox_id: str, wait_s: float, exchange: Exchange) -> None:
        self.door.activity.begin()
        beginning = _Command(self, exchange, sandbox_id).begin(wait_s)
        if self.door.waits:
            exchange.connection.spawn(beginning)
        else:
            _do_now(beginning)


def _do_now(work: Coroutine[Any, Any, None]) -> None:
    """Do what waits for nothing, without the price of a task."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError("a door that does not wait has waited")


class _Command:
    """One command that was asked for, until it is answered: once, by whatever comes first."""

    def __init__(self, express: Express, exchange: Exchange, sandbox_id: str) -> None:
        self._service: Service = express.app.state.service
        self._door, self._exchange, self._scope = express.door, exchange, exchange.scope
        self._scope["app"] = express.app
        self._scope["path_params"] = {"sandbox_id": sandbox_id}
        self._scope[KNOWN] = _TEMPLATE
        self._trace = given_trace(self._scope)
        self._about: list[tuple[bytes, bytes]] = []
        """Headers of the answer that tell how the request was understood."""
        self._cut: tuple[str, Cut] | None = None
        self._let_go: Callable[[], None] | None = None
        """Lets go of the command: it may run for long after this has been answered."""
        self._settled = False
        self._tenant: Tenant
        self._operation_id: str | None

    async def begin(self, wait_s: float) -> None:
        """Let the request in, and begin what it asks for."""
        tracing.enter(self._trace)  # so does whatever else comes by this connection
        parent = None if self._trace is None else tracing.traceparent()
        if parent is not None:
            self._about.append((_TRACE, parent.encode()))
        try:
            if await self._let_in():
                self._run(wait_s)
        except Exception as error:  # noqa: BLE001 - as the application's own last handler
            self._fail(error)

    async def _let_in(self) -> bool:
        try:
            sender, version = await let_in(self._scope, self._door.admit)
        except ColdframeError as error:
            self._answer(refusal(error))
            return False
        if version is not None:
            self._about.append(spoken(version))
        if sender is not None and sender.keyed:
            cut = self._door.watch.begin(sender.name, self._revoked)
            self._cut = sender.name, cut
        return True

    def _run(self, wait_s: float) -> None:
        service, node = self._service, self._service.node
        self._tenant = tenant_of(service, self._scope["state"]["identity"], Scope.EXEC)
        text = require_small(self._exchange.body, service.settings.json_bytes)
        wanted = self._tenant.request(wire.load(ExecRequest, text))
        self._operation_id = wanted.operation_id
        inner = self._tenant.sandbox(self._scope["path_params"]["sandbox_id"])
        service.polls.call_late(wait_s, self._late)
        self._let_go = node.begin_exec(inner, wanted, self._ended)

    def _ended(self, ended: ExecResult | BaseException) -> None:
        if self._settled:
            return
        if isinstance(ended, BaseException):
            self._fail(ended)
            return
        try:
            shown = self._tenant.result(ended)
            self._answer(result_answer(self._service, self._tenant, ended, shown))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _late(self) -> None:
        try:
            self._answer(running(self._tenant, self._operation_id))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _revoked(self) -> None:
        self._answer(refusal(revoked()))

    def _fail(self, error: BaseException) -> None:
        self._settle()
        self._exchange.connection.spawn(self._explain(error))

    async def _explain(self, error: BaseException) -> None:
        if isinstance(error, ColdframeError):
            self._send(await failures.answer_to(Request(self._scope), error))
        else:
            failures.note_fault(self._scope, error)
            self._send(failures.fault())

    def _answer(self, response: Response) -> None:
        self._settle()
        self._send(response)

    def _settle(self) -> None:
        """Nothing else answers any more."""
        self._settled = True
        self._service.polls.forget(self._late)
        let_go, self._let_go = self._let_go, None  # it leads back here, and cycles stay for long
        if let_go is not None:
            let_go()
        if self._cut is not None:
            self._door.watch.end(*self._cut)
            self._cut = None

    def _send(self, response: Response) -> None:
        response.raw_headers += self._about
        self._door.auditor.note(self._scope, response.status_code, self._trace)
        self._service.meters.count(response.status_code)
        self._exchange.answer(response, self._door.activity.end)
