"""Isolated Linux sandboxes, rollouts and trajectories for training language-model agents.

What is exported here is loaded when it is first asked for: `import coldframe` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldframe.client import (
        AsyncFiles,
        AsyncOutputStream,
        AsyncProcess,
        AsyncSandbox,
        AsyncSandboxClient,
        AsyncSession,
        ExecOptions,
        Files,
        OutputStream,
        Patched,
        Process,
        Sandbox,
        SandboxClient,
        Session,
    )
    from coldframe.protocol.errors import (
        CapabilityError,
        CapacityError,
        ClientClosedError,
        ColdframeError,
        ConflictError,
        CreateError,
        Execution,
        FileError,
        ImageError,
        ImageNotFoundError,
        InvalidRequestError,
        NotExecutedError,
        OutputNotKeptError,
        PatchError,
        PathNotFoundError,
        PathRefusedError,
        PortUnreachableError,
        SandboxGoneError,
        SandboxNotFoundError,
        SessionEndedError,
        Side,
        SpawnerLostError,
        StaleBaseError,
    )
    from coldframe.protocol.models import (
        Capabilities,
        ExecResult,
        FileEntry,
        FileKind,
        FileStat,
        Fingerprint,
        Ledger,
        Output,
        OutputChunk,
        PortUrl,
        ProcessInfo,
        PtySize,
        Reason,
        SandboxInfo,
        SandboxState,
        SignalScope,
    )
    from coldframe.protocol.network import (
        Credential,
        EgressDecision,
        EgressEvent,
        EgressEvents,
        EgressKind,
        NetworkPolicy,
        NetworkRule,
    )

__version__ = "0.1.0"

_HOMES = {
    "coldframe.client": (
        "AsyncFiles",
        "AsyncOutputStream",
        "AsyncProcess",
        "AsyncSandbox",
        "AsyncSandboxClient",
        "AsyncSession",
        "ExecOptions",
        "Files",
        "OutputStream",
        "Patched",
        "Process",
        "Sandbox",
        "SandboxClient",
        "Session",
    ),
    "coldframe.protocol.errors": (
        "CapabilityError",
        "CapacityError",
        "ClientClosedError",
        "ColdframeError",
        "ConflictError",
        "CreateError",
        "Execution",
        "FileError",
        "ImageError",
        "ImageNotFoundError",
        "InvalidRequestError",
        "NotExecutedError",
        "OutputNotKeptError",
        "PatchError",
        "PathNotFoundError",
        "PathRefusedError",
        "PortUnreachableError",
        "SandboxGoneError",
        "SandboxNotFoundError",
        "SessionEndedError",
        "Side",
        "SpawnerLostError",
        "StaleBaseError",
    ),
    "coldframe.protocol.models": (
        "Capabilities",
        "ExecResult",
        "FileEntry",
        "FileKind",
        "FileStat",
        "Fingerprint",
        "Ledger",
        "Output",
        "OutputChunk",
        "PortUrl",
        "ProcessInfo",
        "PtySize",
        "Reason",
        "SandboxInfo",
        "SandboxState",
        "SignalScope",
    ),
    "coldframe.protocol.network": (
        "Credential",
        "EgressDecision",
        "EgressEvent",
        "EgressEvents",
        "EgressKind",
        "NetworkPolicy",
        "NetworkRule",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncFiles",
    "AsyncOutputStream",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncSession",
    "Capabilities",
    "CapabilityError",
    "CapacityError",
    "ClientClosedError",
    "ColdframeError",
    "ConflictError",
    "CreateError",
    "Credential",
    "EgressDecision",
    "EgressEvent",
    "EgressEvents",
    "EgressKind",
    "ExecOptions",
    "ExecResult",
    "Execution",
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


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
