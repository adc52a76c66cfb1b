"""The table of runtimes: names, lazily loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coldframe import runtimes
from coldframe.protocol.errors import InvalidRequestError


def test_every_name_of_the_table_loads() -> None:
    """A line that names what is not there would fail only on the day it is asked for."""
    for name in runtimes.RUNTIMES:
        assert runtimes.load(name).__name__.lower() == f"{name}runtime"
    assert set(runtimes.names()) >= {"fake", "native"}


def test_load_unknown_runtime_names_those_there_are() -> None:
    """One clear sentence."""
    with pytest.raises(InvalidRequestError, match=r"is not known: .*native"):
        runtimes.load("nativ")


def test_load_runtime_that_cannot_be_imported_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Third parties' entry points break in their own ways."""
    monkeypatch.setitem(runtimes.RUNTIMES, "broken", "coldframe.no_such_module:X")
    monkeypatch.setitem(runtimes.RUNTIMES, "renamed", "coldframe.runtimes.base:NoSuch")

    for name in ("broken", "renamed"):
        with pytest.raises(InvalidRequestError, match="cannot be loaded"):
            runtimes.load(name)


def test_package_import_loads_no_backend() -> None:
    """A client without root needs nothing of the kernel's."""
    script = (
        "import sys, coldframe.runtimes;"
        "print([m for m in sys.modules if m.startswith(('coldframe.host', 'coldframe.runtimes.'))])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert shown.stdout == b"[]\n"
