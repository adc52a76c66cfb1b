"""Callers of a service that are no SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coldframe import Sandbox, SandboxClient
from tests.fixtures.service import Service
from tests.fixtures.waiting import wait_until


def http(url: str, key: str | None = None) -> httpx.Client:
    """A plain HTTP client of a service's socket or address."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
        return httpx.Client(
            transport=transport, base_url="http://localhost", headers=headers, timeout=30
        )
    return httpx.Client(base_url=url, headers=headers, timeout=30)


def audit_lines(home: Path) -> list[dict[str, Any]]:
    """Return what the newest file of a service's audit log says."""
    return [json.loads(line) for line in (home / "audit" / "audit.jsonl").read_bytes().splitlines()]


def until_logged(service: Service, words: str) -> None:
    """Wait until a service's log has them: it comes by a pipe, after the answer."""
    wait_until(lambda: any(words in line for line in service.log))


@pytest.fixture
def caller(service: Service) -> Iterator[httpx.Client]:
    """A plain HTTP client on the socket."""
    with http(service.unix) as client:
        yield client


@pytest.fixture
def remote(service: Service) -> Iterator[SandboxClient]:
    """The SDK on TCP."""
    with SandboxClient(url=service.tcp) as client:
        yield client


@pytest.fixture
def served(remote: SandboxClient) -> Iterator[Sandbox]:
    """A sandbox of the service's."""
    with remote.create_sandbox("any") as sandbox:
        yield sandbox
