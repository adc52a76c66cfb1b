"""The public face: what is exported, what importing it costs, and that sync is async's twin."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import coldframe
import coldframe.client
from coldframe.client import _generate

PUBLIC = [
    "AsyncFiles",
    "AsyncOutputStream",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncSession",
    "Capabilities",
    "CapabilityError",
    "CapacityError",
    "Change",
    "ClientClosedError",
    "ColdframeError",
    "ConflictError",
    "CreateError",
    "Credential",
    "CursorExpiredError",
    "EgressDecision",
    "EgressEvent",
    "EgressEvents",
    "EgressKind",
    "ExecInfo",
    "ExecOptions",
    "ExecResult",
    "Execution",
    "FileChange",
    "FileChanges",
    "FileEntry",
    "FileError",
    "FileKind",
    "FileStat",
    "Files",
    "Fingerprint",
    "ImageError",
    "ImageNotFoundError",
    "InvalidRequestError",
    "Ledger",
    "NetworkPolicy",
    "NetworkRule",
    "NotExecutedError",
    "Output",
    "OutputChunk",
    "OutputNotKeptError",
    "OutputStream",
    "PatchError",
    "Patched",
    "PathNotFoundError",
    "PathRefusedError",
    "PortUnreachableError",
    "PortUrl",
    "Process",
    "ProcessInfo",
    "PtySize",
    "Reason",
    "Sandbox",
    "SandboxClient",
    "SandboxEvent",
    "SandboxGoneError",
    "SandboxInfo",
    "SandboxNotFoundError",
    "SandboxState",
    "Session",
    "SessionEndedError",
    "Side",
    "SignalScope",
    "SpawnerLostError",
    "StaleBaseError",
]

PAIRS = [
    ("AsyncSandboxClient", "SandboxClient"),
    ("AsyncSandbox", "Sandbox"),
    ("AsyncProcess", "Process"),
    ("AsyncOutputStream", "OutputStream"),
    ("AsyncSession", "Session"),
    ("AsyncFiles", "Files"),
]


def loaded_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_public_names_are_exactly_these() -> None:
    """Whoever adds or drops a public name does so on purpose."""
    assert coldframe.__all__ == PUBLIC
    assert set(coldframe.client.__all__) <= set(PUBLIC)
    for name in PUBLIC:
        assert getattr(coldframe, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    """Lazy exports must fail as ordinary ones do."""
    with pytest.raises(AttributeError, match="'nothing'"):
        coldframe.nothing  # noqa: B018


def test_import_coldframe_loads_nothing_of_ours_but_itself() -> None:
    """A program that only looks at the version must not pay for pydantic."""
    loaded = loaded_after("import coldframe")
    assert {name for name in loaded if name.startswith("coldframe")} == {"coldframe"}
    assert "pydantic" not in loaded


def test_import_of_the_sdk_needs_only_client_and_protocol() -> None:
    """The bare install has no extras: the SDK must load without them and without the kernel."""
    loaded = loaded_after("from coldframe import SandboxClient, AsyncSandboxClient")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("coldframe.")}
    assert rooms == {"client", "protocol"}
    assert not {"typer", "rich", "structlog", "unasync", "setuptools"} & loaded


def test_generated_sync_sdk_is_up_to_date() -> None:
    """A change to one SDK that is not in the other is a fault that only users find."""
    assert _generate.stale(_generate.HERE / "_sync") == []


def test_generate_check_names_what_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI must fail, and say which module."""
    (tmp_path / "_async").mkdir()
    (tmp_path / "_sync").mkdir()
    (tmp_path / "_async/x.py").write_text("async def f() -> None:\n    await g()\n")
    monkeypatch.setattr(_generate, "HERE", tmp_path)

    assert _generate.main(["--check"]) == 1
    assert "_sync/x.py" in capsys.readouterr().err
    assert _generate.main([]) == 0
    assert "async" not in (tmp_path / "_sync/x.py").read_text().partition("\n")[2]
    assert _generate.main(["--check"]) == 0


@pytest.mark.parametrize(("asynchronous", "synchronous"), PAIRS)
def test_sync_and_async_have_the_same_face(asynchronous: str, synchronous: str) -> None:
    """Documentation is written once for both."""
    one, other = getattr(coldframe, asynchronous), getattr(coldframe, synchronous)
    names = {name for name in dir(one) if not name.startswith("_")}
    assert names == {name for name in dir(other) if not name.startswith("_")}
    for name in names:
        member, twin = getattr(one, name), getattr(other, name)
        if callable(member):
            assert list(inspect.signature(member).parameters) == list(
                inspect.signature(twin).parameters
            )
            assert not inspect.iscoroutinefunction(twin)
