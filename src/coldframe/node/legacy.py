"""What a node leaves to the process that comes after it: its records, as notes of the runtime's.

A runtime whose sandboxes outlive the process keeps a note with each sandbox and command; from
these, the next process has the node again. Other runtimes keep none, and nothing is done here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic_core import to_json

from coldframe.node.life import Sandbox
from coldframe.protocol import wire
from coldframe.protocol.models import ExecRequest, SandboxSpec, SandboxState
from coldframe.runtimes.outliving import FoundExec, FoundSandbox, Keeps

if TYPE_CHECKING:
    from coldframe.node.session import Session

_FIELDS = (
    "version",
    "created_at",
    "ready_at",
    "ended_at",
    "expires_at",
    "expired",
    "kept_until",
    "queued_s",
    "reason",
    "operation_id",
    "presence",
    "process",
    "claimed",
    "trace_id",
)
"""Of a sandbox, besides its state and what the runtime notes itself."""


_CHANGED = ("cwd", "user", "spool_bytes")
"""What of a request is filled in or changed on its way, besides the environment."""


class Legacy:
    """See `Notes`. `keeps` is set where there is a runtime that keeps them."""

    def __init__(self) -> None:
        self.keeps: Keeps | None = None
        self.find: Callable[[str], Sandbox]
        """Gives a sandbox that is known by its id."""
        self.on_dropped: Callable[[str], None]
        """Told of the id of each operation that the next process will know no more."""
        self.surplus: Callable[[Collection[str]], str]
        """Chooses such a one of the ids of ended commands, oldest first."""

    # --- asked by the runtime ---------------------------------------------------------

    def of_sandbox(self, sandbox_id: str) -> tuple[bytes, float | None]:
        """See `Notes.of_sandbox`."""
        sandbox = self.find(sandbox_id)
        told = {name: getattr(sandbox, name) for name in _FIELDS}
        if sandbox.asked is not None:
            told["asked"] = wire.dump(sandbox.asked, secrets=True).decode()
        return _json({**told, "state": sandbox.state}), sandbox.expires_at

    def of_exec(self, sandbox_id: str, operation_id: str) -> bytes:
        """See `Notes.of_exec`."""
        operation = self.find(sandbox_id).execs[operation_id]
        request = operation.request
        told: dict[str, object] = {
            "began_at": operation.began_at,
            "queued_s": operation.queued_s,
            "trace_id": operation.trace_id,
            "asked": [getattr(request, name) for name in _CHANGED],
        }
        if not request.env and not isinstance(request.cwd, bytes):
            return _json(told)
        del told["asked"]
        return _json(told) + b"\t" + wire.dump(request)

    def give_up_exec(self, operation_ids: Collection[str]) -> str:
        """See `Notes.give_up_exec`."""
        operation_id = self.surplus(operation_ids)
        self.on_dropped(operation_id)
        return operation_id

    # --- told by the node -------------------------------------------------------------

    def note(self, sandbox: Sandbox) -> None:
        """Its record has changed."""
        if self.keeps is not None:
            self.keeps.note_sandbox(sandbox.id)

    def note_session(self, session: Session) -> None:
        """What is to be kept of it has changed: it goes with its shell."""
        if self.keeps is not None:
            self.keeps.note_exec(session.id, _json(session.noted()), session.due_at)

    def drop_sandbox(self, sandbox: Sandbox) -> None:
        """It is known no more."""
        if self.keeps is None:
            return
        if sandbox.operation_id is not None:
            self.on_dropped(sandbox.operation_id)
        self.keeps.drop_sandbox(sandbox.id)

    def drop_exec(self, operation_id: str) -> None:
        """It is known no more, or may be asked for again."""
        if self.keeps is not None:
            self.keeps.drop_exec(operation_id)


def _json(told: dict[str, object]) -> bytes:
    """As `json.dumps` in a third of the time, but for text with lone surrogates."""
    try:
        return to_json(told)
    except ValueError:
        return json.dumps(told).encode()


def read_sandbox(found: FoundSandbox, empty: Sandbox) -> Sandbox:
    """Fill in the record of a sandbox as the process before had noted it."""
    told = json.loads(found.note)
    for name in _FIELDS:
        setattr(empty, name, told[name])
    empty.state = SandboxState(told["state"])
    if "asked" in told:
        empty.asked = wire.load(SandboxSpec, told["asked"].encode())
    return empty


@dataclass(frozen=True)
class ExecNote:
    """What was noted with a command."""

    request: ExecRequest
    began_at: float
    queued_s: float
    trace_id: str | None


def read_exec(found: FoundExec) -> ExecNote:
    """Return what the process before had noted with a command."""
    text, _, whole = found.note.partition(b"\t")
    told = json.loads(text)
    if whole:
        request = wire.load(ExecRequest, whole)
    else:
        asked = dict(zip(_CHANGED, told["asked"], strict=True))
        request = found.request.model_copy(update={**asked, "env": {}})
    return ExecNote(request, told["began_at"], told["queued_s"], told["trace_id"])
