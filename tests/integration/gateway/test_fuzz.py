"""Whatever is sent to the routes of the document, the answer is one that the document declares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldframe import Sandbox, SandboxClient
from coldframe.gateway.openapi import document
from tests.fixtures.service import Service
from tests.integration.gateway.conftest import http

OPERATIONS = [
    (method, path, operation)
    for path, operations in document()["paths"].items()
    for method, operation in operations.items()
    # These two make or end what the other examples use, or wait for a sandbox of their own.
    if (method, path) not in {("delete", "/v1/sandboxes/{sandbox_id}"), ("get", "/healthz")}
]

numbers = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, 30, 65535])
words = (
    st.text(max_size=12)
    | st.sampled_from(["", "..", "/", "/tmp", "%00", "\x00", "true", "a=b", "stdout"])
    | numbers.map(str)
)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | words, lambda inner: st.lists(inner, max_size=3)
)


def _body(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    names = sorted(schema.get("properties", {"x": 0}))
    good = st.sampled_from([{"command": "true"}, {"image": "any", "ttl_s": 5.0}, {"signal": 15}])
    return good | st.dictionaries(st.sampled_from(names), values, max_size=4) | values


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, list[tuple[str, str]], bytes]:
    """A request that names a route of the document, and otherwise anything."""
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    query = []
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query" and draw(st.booleans()):
            value = "0" if parameter["name"] == "wait_s" else draw(words)
            query.append((parameter["name"], value))
        if parameter["in"] == "path":
            chosen = draw(st.sampled_from(["{live}", "{done}", "stdout", "80"]) | words)
            path = path.replace("{" + parameter["name"] + "}", chosen or "x")
    schemas = document_schemas()
    told = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if told is None:
        return method, path, query, draw(st.binary(max_size=40))
    schema = schemas[told["schema"]["$ref"].rpartition("/")[2]]
    return method, path, query, json.dumps(draw(_body(schema))).encode()


def document_schemas() -> dict[str, Any]:
    return SCHEMAS


SCHEMAS: dict[str, Any] = document()["components"]["schemas"]


@pytest.fixture(scope="module")
def target(service: Service) -> Iterator[tuple[httpx.Client, Sandbox]]:
    """A plain client, and a sandbox with a command that has ended."""
    with (
        http(service.tcp) as caller,
        SandboxClient(url=service.unix) as client,
        client.create_sandbox("any") as sandbox,
    ):
        sandbox.exec("echo done", operation_id="done")
        yield caller, sandbox


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request_=requests())
def test_every_answer_is_declared_and_no_fault(
    target: tuple[httpx.Client, Sandbox],
    request_: tuple[str, str, list[tuple[str, str]], bytes],
) -> None:
    """An odd request must be refused in words, never break the service."""
    caller, sandbox = target
    method, path, query, body = request_
    path = quote(path.replace("{live}", sandbox.id).replace("{done}", "done"), safe="/%")
    path = path.replace("%00", "x").replace("//", "/x/")

    answer = caller.request(method, path, params=query, content=body)

    assert answer.status_code < 500 or answer.status_code == 501, (method, path, answer.text)
    if answer.status_code >= 400 and answer.status_code != 416:
        assert {"code", "message", "execution"} <= answer.json().keys()
