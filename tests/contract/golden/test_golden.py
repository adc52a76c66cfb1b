"""Behaviour that clients rely on, as requests with known answers: tests/golden/protocol-N.json.

Who changes what one of them says raises PROTOCOL_VERSION, copies the newest file to one of the new
version, changes that, and adds its digest here. The file of a version never changes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coldframe.client._requests import signal_number
from coldframe.gateway.models import Signal
from coldframe.gateway.openapi import document
from coldframe.images.store import ImageStore
from coldframe.protocol import models, wire
from coldframe.protocol.errors import ColdframeError
from tests.fixtures.service import Service, serving
from tests.integration.gateway.conftest import http

DIRECTORY = Path(__file__).parents[2] / "golden"
DIGESTS = {1: "c920af7ccbf25709d508210a0cd897b605f70e3bee6ab863c40467c42db42462"}
"""SHA-256 of the file of each version that there ever was."""

REMEDY = "behaviour has changed: raise PROTOCOL_VERSION and add a golden file, see the top of this"
GOLDEN = json.loads((DIRECTORY / f"protocol-{wire.PROTOCOL_VERSION}.json").read_text())


def test_golden_files_are_those_that_were_released() -> None:
    """A file that is edited in place would let behaviour change without anybody's notice."""
    found = {
        int(file.stem.partition("-")[2]): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in DIRECTORY.glob("protocol-*.json")
    }
    assert found == DIGESTS, REMEDY
    assert max(found) == wire.PROTOCOL_VERSION == GOLDEN["protocol"]


def test_defaults_are_those_of_this_protocol() -> None:
    """What is left out of a request means the same on every peer of one version."""
    made = {
        "SandboxSpec": models.SandboxSpec(image="any"),
        "ExecRequest": models.ExecRequest(command="true"),
        "SessionRequest": models.SessionRequest(),
        "SessionExecRequest": models.SessionExecRequest(command="true"),
        "PtySize": models.PtySize(),
        "Signal": Signal(signal=15),
    }
    for name, known in GOLDEN["defaults"].items():
        _same(json.loads(wire.dump(made[name])), known, name)
    assert GOLDEN["bounds"] == {"LONGEST_POLL_S": wire.LONGEST_POLL_S}, REMEDY
    assert {name: signal_number(name) for name in GOLDEN["signals"]} == GOLDEN["signals"], REMEDY


def test_parameters_and_errors_are_those_of_this_protocol() -> None:
    """A default time-out that changes makes old clients wait for something else."""
    paths = document()["paths"]
    for route, known in GOLDEN["parameters"].items():
        method, _, path = route.partition(" ")
        declared = paths[path][method.lower()]["parameters"]
        defaults = {one["name"]: one["schema"].get("default") for one in declared}
        _same(defaults, known, route)
    from coldframe.gateway.failures import status_of

    for code, known in GOLDEN["errors"].items():
        error = wire.CODES[code]("")
        if isinstance(error, ColdframeError):
            assert [status_of(error), error.retryable, error.side] == known, (code, REMEDY)
        else:
            assert status_of(error) == known[0], (code, REMEDY)


@pytest.fixture(scope="module")
def caller(
    tmp_path_factory: pytest.TempPathFactory, image_store: ImageStore
) -> Iterator[httpx.Client]:
    """A plain HTTP client of a service on the native runtime."""
    images = image_store.layers_directory.parent
    with serving(tmp_path_factory.mktemp("golden"), "native", images=images) as service:
        assert isinstance(service, Service)
        with http(service.unix) as client:
            yield client


@pytest.mark.root
@pytest.mark.parametrize("action", GOLDEN["actions"], ids=lambda action: action["name"])
def test_action_has_the_result_that_it_had(caller: httpx.Client, action: dict[str, Any]) -> None:
    """The same request has the same answer, byte for byte, on every peer of one version."""
    spec = {"image": "busybox", **action.get("spec", {})}
    sandbox = caller.post("/v1/sandboxes", json=spec).json()["id"]
    try:
        for step in action["steps"]:
            _take(caller, step, sandbox)
    finally:
        caller.delete(f"/v1/sandboxes/{sandbox}")


def _take(caller: httpx.Client, step: dict[str, Any], sandbox: str) -> None:
    method, path, *body = step["ask"]
    content = body[0] if body else None
    if content is not None and not isinstance(content, str):
        content = json.dumps(content)
    answer = caller.request(
        method, path.replace("{sandbox}", sandbox), content=content, headers=step.get("with")
    )
    said = (step["ask"], answer.text)
    assert answer.status_code == step["status"], (said, REMEDY)
    for name, value in step.get("headers", {}).items():
        assert answer.headers[name] == value, (said, name, REMEDY)
    if "text" in step:
        assert answer.content.decode("latin-1") == step["text"], (said, REMEDY)
    if "body" in step:
        _same(_decoded(answer.json()), step["body"], str(step["ask"]))


def _decoded(value: Any, key: str = "") -> Any:
    """Show content as text, a byte as a character."""
    if isinstance(value, dict):
        return {name: _decoded(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if key in {"head", "tail"}:
        return base64.urlsafe_b64decode(value).decode("latin-1")
    return value


def _same(actual: Any, known: Any, where: str) -> None:
    """Compare what is known; fields that are new are no change."""
    if isinstance(known, dict):
        assert isinstance(actual, dict), (where, actual)
        for name, one in known.items():
            if not known[name] and isinstance(one, dict):
                assert actual[name] == one, (f"{where}.{name}", REMEDY)
            _same(actual[name], one, f"{where}.{name}")
    elif isinstance(known, list):
        assert isinstance(actual, list) and len(actual) == len(known), (where, actual, REMEDY)
        for number, (one, other) in enumerate(zip(actual, known, strict=True)):
            _same(one, other, f"{where}[{number}]")
    else:
        assert actual == known, (where, actual, known, REMEDY)
