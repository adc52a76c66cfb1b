"""The interface that is committed is the one that is served."""

from __future__ import annotations

import re
from pathlib import Path

from coldframe.gateway.openapi import as_json, as_markdown, document

DOCS = Path(__file__).resolve().parents[3] / "docs"


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
