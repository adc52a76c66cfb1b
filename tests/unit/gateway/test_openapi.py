"""The interface that is committed is the one that is served."""

from __future__ import annotations

import re
from pathlib import Path

from coldframe.gateway.openapi import as_json, as_markdown, document

DOCS = Path(__file__).resolve().parents[3] / "docs"

BY_BODY = "the body's `operation_id` does the same"
ALWAYS_THE_SAME = "it ends in the same state however often it is asked for"
CONNECTION = "it is a connection, which ends with what asked for it"
WITHOUT_KEY = {
    "POST /v1/sandboxes/{sandbox_id}/execs": BY_BODY,
    "POST /v1/sandboxes/{sandbox_id}/sessions": BY_BODY,
    "POST /v1/sessions/{session_id}/execs": BY_BODY,
    "POST /v1/execs/{operation_id}/cancel": ALWAYS_THE_SAME,
    "POST /v1/execs/{operation_id}/mark": ALWAYS_THE_SAME,
    "POST /v1/sandboxes/{sandbox_id}/ports/{port}/stream": CONNECTION,
    "POST /v1/presence": CONNECTION,
}
"""Routes with effects that take no `Idempotency-Key`, and why they need none."""


def test_committed_interface_is_the_one_that_is_served() -> None:
    """Whoever writes a client reads the document, not the code."""
    described = document()

    remedy = "run: python -m coldframe.gateway.openapi docs"
    assert (DOCS / "openapi.json").read_text() == as_json(described), remedy
    assert (DOCS / "api.md").read_text() == as_markdown(described), remedy


def test_every_route_says_what_it_does_and_how_it_fails() -> None:
    """A client's author must find the errors of every route."""
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            assert operation.get("description"), (method, path)
            assert "default" in operation["responses"], (method, path)


def test_document_has_every_schema_that_it_points_to() -> None:
    """Whoever generates a client from it gets an error for one that is missing."""
    described = document()
    pointed = set(re.findall(r'"#/components/schemas/([^"]+)"', as_json(described)))
    assert pointed <= described["components"]["schemas"].keys()


def test_every_route_with_effects_takes_an_idempotency_key_or_needs_none() -> None:
    """After a lost connection nobody knows what was done; by a key it is asked again."""
    without, by_body = set(), set()
    described = document()
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            route = f"{method.upper()} {path}"
            headers = [one for one in operation.get("parameters", ()) if one["in"] == "header"]
            if method != "get" and "idempotency-key" not in {
                one["name"].lower() for one in headers
            }:
                without.add(route)
            if "requestBody" in operation and method == "post":
                (kind,) = operation["requestBody"]["content"].values()
                name = kind["schema"].get("$ref", "").rpartition("/")[2]
                if "operation_id" in described["components"]["schemas"].get(name, {}).get(
                    "properties", {}
                ):
                    by_body.add(route)

    assert without == WITHOUT_KEY.keys()
    assert {route for route, why in WITHOUT_KEY.items() if why is BY_BODY} == by_body
