"""`coldframe sandbox` as processes of their own, on a service as it is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from coldframe import Sandbox, SandboxClient
from tests.fixtures.service import Service

COMMAND = [sys.executable, "-m", "coldframe.cli.main", "sandbox"]


@pytest.fixture
def box(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A sandbox called `box`; commands find its service by COLDFRAME_URL."""
    monkeypatch.setenv("COLDFRAME_URL", service.unix)
    with (
        SandboxClient(url=service.unix) as client,
        client.create_sandbox("any", name="box") as sandbox,
    ):
        yield sandbox


def run(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `coldframe sandbox WORDS` to its end."""
    return subprocess.run(
        [*COMMAND, *words], check=False, capture_output=True, input=stdin, timeout=60
    )
