"""What crosses the seams, by what it speaks of. Frozen, checked when it is made.

Sizes are bytes, durations are seconds, times are Unix seconds unless a name says otherwise.
"""

from __future__ import annotations

from coldframe.protocol.models.base import GIB, MIB, Flag, Model, Number, Whole
from coldframe.protocol.models.commands import (
    Argument,
    ExecInfo,
    ExecRequest,
    ExecResult,
    Output,
    OutputChunk,
    ProcessInfo,
    PtySize,
    Reason,
    Resources,
    SignalScope,
    Stream,
)
from coldframe.protocol.models.events import EventKind, EventPage, SandboxEvent, StorageEvent
from coldframe.protocol.models.files import (
    HASHED_FILE_BYTES,
    MOST_CHANGES,
    Change,
    FileChange,
    FileChanges,
    FileEntry,
    FileKind,
    FileStat,
)
from coldframe.protocol.models.guards import GuardedFile, GuardRefusal, GuardReport, GuardRequest
from coldframe.protocol.models.node import Capabilities, Fingerprint, ImageInfo, Ledger
from coldframe.protocol.models.sandboxes import (
    DiskExtension,
    ImageHealthcheck,
    ImageStart,
    PortUrl,
    Quota,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from coldframe.protocol.models.sessions import (
    SessionExecRequest,
    SessionInfo,
    SessionRequest,
    SessionResult,
)

__all__ = [
    "GIB",
    "HASHED_FILE_BYTES",
    "MIB",
    "MOST_CHANGES",
    "Argument",
    "Capabilities",
    "Change",
    "DiskExtension",
    "EventKind",
    "EventPage",
    "ExecInfo",
    "ExecRequest",
    "ExecResult",
    "FileChange",
    "FileChanges",
    "FileEntry",
    "FileKind",
    "FileStat",
    "Fingerprint",
    "Flag",
    "GuardRefusal",
    "GuardReport",
    "GuardRequest",
    "GuardedFile",
    "ImageHealthcheck",
    "ImageInfo",
    "ImageStart",
    "Ledger",
    "Model",
    "Number",
    "Output",
    "OutputChunk",
    "PortUrl",
    "ProcessInfo",
    "PtySize",
    "Quota",
    "Reason",
    "Resources",
    "SandboxEvent",
    "SandboxInfo",
    "SandboxSpec",
    "SandboxState",
    "SessionExecRequest",
    "SessionInfo",
    "SessionRequest",
    "SessionResult",
    "SignalScope",
    "StorageEvent",
    "Stream",
    "Whole",
]
