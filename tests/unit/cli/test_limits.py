"""What the command line can say of a sandbox is what the SDK can."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from coldframe import AsyncSandboxClient
from coldframe.cli.run import run
from coldframe.cli.sandbox import create

_OPTIONS = {
    "memory_bytes": "memory",
    "disk_bytes": "disk",
    "shm_bytes": "shm",
    "labels": "label",
    "ttl_s": "ttl",
}


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (create, set()),
        (run, {"labels", "ttl_s", "name"}),  # of a sandbox that others find
    ],
)
def test_every_argument_of_create_sandbox_has_an_option(
    command: Callable[..., Any], without: set[str]
) -> None:
    """Who works by shell must not have to write a program for one limit."""
    arguments = inspect.signature(AsyncSandboxClient.create_sandbox).parameters
    wanted = {name for name, one in arguments.items() if one.kind is one.KEYWORD_ONLY}
    wanted -= {"operation_id", *without}
    options = inspect.signature(command).parameters
    assert {_OPTIONS.get(name, name) for name in wanted} <= set(options)
