"""Schemathesis over the OpenAPI document: whatever it makes up, the answer is a declared one.

Against a real service with real sandboxes. Half of what it sends names things that are there, so
that it gets past the lookup. The long form (`--long`) sends fifty times as much. Run by
`test_document.py`.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from pydantic import BaseModel, ValidationError
from schemathesis import checks

from coldframe import Sandbox, SandboxClient
from coldframe.gateway.openapi import document
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.models import (
    ExecRequest,
    SandboxSpec,
    SessionExecRequest,
    SessionRequest,
)
from coldframe.protocol.network import NetworkPolicy
from coldframe.protocol.wire import LONGEST_POLL_S
from tests.fixtures.service import serving

pytestmark = pytest.mark.root

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
DONE, SHELL = "done", "shell"
"""Operation ids of a command that has ended, and of a session."""
_LONGEST_WAIT_S = 0.05
_DEFAULT_WAIT_S = 30.0

BODIES: dict[str, type[BaseModel]] = {
    "/v1/sandboxes": SandboxSpec,
    "/v1/sandboxes/{sandbox_id}/execs": ExecRequest,
    "/v1/sandboxes/{sandbox_id}/network": NetworkPolicy,
    "/v1/sandboxes/{sandbox_id}/sessions": SessionRequest,
    "/v1/sessions/{session_id}/execs": SessionExecRequest,
}

schema = schemathesis.openapi.from_dict(document())


class Target:
    """A service, and a sandbox of it with a command that has ended; made anew when it is gone."""

    def __init__(self, url: str, client: SandboxClient, image: str) -> None:
        self.url, self.image = url, image
        self._client = client
        self._sandbox: Sandbox | None = None

    def sandbox_id(self) -> str:
        """Return the id of a sandbox that is ready."""
        if self._sandbox is None or self._sandbox.refresh().state != "ready":
            self._sandbox = self._client.create_sandbox(self.image)
            self._sandbox.exec("mkdir -p /tmp/d; echo x > /tmp/f")
            with contextlib.suppress(Exception):
                self._sandbox.exec("echo done", operation_id=DONE)
        with contextlib.suppress(Exception):  # one that was ended is known no less
            self._sandbox.session(operation_id=SHELL)
        return self._sandbox.id

    def tidy(self) -> None:
        """Delete what was made by what was sent."""
        for other in self._client.list_sandboxes():
            if self._sandbox is None or other.id != self._sandbox.id:
                other.delete()


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, image_store: ImageStore, busybox_image: Image
) -> Iterator[Target]:
    """A service on the native runtime: what is made up is run, and must not be run out here."""
    images = image_store.layers_directory.parent
    with (
        serving(tmp_path_factory.mktemp("document"), "native", images=images) as service,
        SandboxClient(url=service.unix) as client,
    ):
        yield Target(service.tcp, client, busybox_image.name)


def _often(value: object) -> bool:
    """Whether a made-up value gives way to one that is there: of the same value always the same."""
    return zlib.crc32(repr(value).encode("utf-8", "surrogatepass")) % 4 != 0


def _aim(case: schemathesis.Case, target: Target) -> None:
    """Name what is there, and wait for nothing long."""
    if case.headers and _often(case.headers.get("idempotency-key")):
        case.headers.pop("idempotency-key", None)
    path, query, body = case.path_parameters or {}, case.query or {}, case.body
    known = {"sandbox_id": target.sandbox_id(), "operation_id": DONE, "session_id": SHELL}
    for name in known.keys() & path.keys():
        if _often(path[name]):
            path[name] = known[name]
    for name in ("path", "target"):
        if name in query and _often(query[name]):
            query[name] = f"/tmp/{'f' if _often(len(str(query[name]))) else 'd'}"
    kind = BODIES.get(case.path)
    if kind is not None and isinstance(body, dict) and _often(sorted(body)):
        _mend(kind, body)
        if kind is SandboxSpec:
            body["image"] = target.image
    if any(one["name"] == "wait_s" for one in case.operation.definition.raw.get("parameters", ())):
        asked = query.get("wait_s", _DEFAULT_WAIT_S)
        with contextlib.suppress(TypeError, ValueError):
            if _LONGEST_WAIT_S < float(asked) <= LONGEST_POLL_S:
                query["wait_s"] = _LONGEST_WAIT_S
        case.query = query


def _mend(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Leave out what is refused at once, so that the rest of an odd request gets to its work."""
    for _ in range(len(kind.model_fields) + 3):
        try:
            kind.model_validate_json(json.dumps(body))
        except ValidationError as error:
            where = error.errors()[0]["loc"]
            body.pop(str(where[0]) if where else "argv", None)
            if kind is SessionExecRequest or (kind is ExecRequest and "argv" not in body):
                body["command"] = "true"
            if kind is SandboxSpec:
                body.setdefault("image", "any")
        else:
            return


def _send(case: schemathesis.Case, target: Target) -> None:
    _aim(case, target)
    arguments: dict[str, Any] = {"base_url": target.url, "timeout": 60}
    case.call_and_validate(checks=CHECKS, **arguments)
    if (case.method, case.path) == ("POST", "/v1/sandboxes"):
        target.tidy()


_QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@schema.parametrize()
@settings(max_examples=10, **_QUIET)
def test_every_answer_is_declared_and_no_fault(case: schemathesis.Case, target: Target) -> None:
    """An odd request must be refused in words, never break the service."""
    _send(case, target)


@pytest.mark.long
@pytest.mark.timeout(1800)
@schema.parametrize()
@settings(max_examples=500, **{**_QUIET, "derandomize": False})
def test_every_answer_is_declared_and_no_fault_for_long(
    case: schemathesis.Case, target: Target
) -> None:
    """The same with luck of the day."""
    _send(case, target)
