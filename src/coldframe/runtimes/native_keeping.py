"""What the native runtime lets its spawner keep, so that another process can go on with it.

With each sandbox and command goes a note: how the runtime made it, and what its node says of it.
By names of their own: the node's lock, its cgroups and storage, and the locks of its id ranges.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pydantic import TypeAdapter
from pydantic_core import to_json

from coldframe.host.cgroups import NodeCgroups
from coldframe.host.execution import EXEC, MORE
from coldframe.host.idranges import IdRanges
from coldframe.host.outcome import Outcome
from coldframe.host.pipes import CommandPipes
from coldframe.host.spares import SpareUppers
from coldframe.host.spawner import ExecEnd, Execution, Keep, Spawner
from coldframe.host.worker import Worker
from coldframe.images.base import Image
from coldframe.protocol import wire
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.runtimes.outliving import Notes

NODE, IDS = "node", "ids."
_MOST_BYTES = 64 << 10
"""Longer notes go as a file in memory."""
_MOST_SPOOLED = 1024
"""Ended commands whose spools are kept: each costs two descriptors."""
_IMAGES = TypeAdapter(Image)


@dataclass(eq=False)
class _Record:
    """What is noted with a sandbox besides the node's words."""

    spec: SandboxSpec
    image: Image
    id_base: int
    resolv: str | None = None
    """What its resolv.conf held before the first policy, as `NativeEgress` tells it."""
    worker: Worker | None = None


@dataclass(frozen=True)
class SandboxNote:
    """What was noted with a sandbox."""

    spec: SandboxSpec
    image: Image
    id_base: int
    upper: str
    """Its name in the storage."""
    resolv: str | None
    node: bytes


@dataclass(frozen=True)
class ExecNote:
    """What was noted with a command."""

    sandbox_id: str
    operation_id: str
    request: ExecRequest
    """With everything filled in."""
    pipes: tuple[str, ...]
    """Names of the descriptors that are kept with it."""
    node: bytes


class Keeping:
    """See `Keeps`. The notes of one runtime; belongs to its event loop."""

    def __init__(self, notes: Notes, lock: int | None, grace_s: float) -> None:
        """See `Outlives.outlive`."""
        self._notes = notes
        self.lock, self.grace_s = lock, grace_s
        self._sandboxes: dict[str, _Record] = {}
        self._execs: dict[str, tuple[Worker, int]] = {}
        """Of each command: who keeps something with it, and its number there."""
        self._more: set[str] = set()
        """Commands of which the node has noted more."""
        self._spooled: OrderedDict[str, None] = OrderedDict()
        self.storage: SpareUppers

    # --- the node ---------------------------------------------------------------------

    def keep_node(self, spawner: Spawner, cgroups: NodeCgroups, ids: IdRanges) -> None:
        """Let the workers of a spawner hold what all sandboxes need."""
        assert self.lock is not None
        told = {
            "cgroups": {name: str(path) for name, path in cgroups.paths.items()},
            "limits": sorted(cgroups.limits),
            "storage": self.storage.name,
            "fallback": self.storage.fallback_from,
            "program": spawner.program_sha256,
        }
        held = (self.lock, *self.storage.kept())
        spawner.keep(NODE, Keep(json.dumps(told).encode(), held))
        for number, fd in ids.blocks.items():
            self.keep_block(spawner, number, fd)

    @staticmethod
    def keep_block(spawner: Spawner, number: int, lock: int) -> None:
        """Let the workers hold a block of id ranges."""
        spawner.keep(f"{IDS}{number}", Keep(b"", (lock,)))

    # --- sandboxes --------------------------------------------------------------------

    @contextlib.contextmanager
    def creating(
        self, sandbox_id: str, spec: SandboxSpec, image: Image, id_base: int
    ) -> Iterator[Keep]:
        """What goes with the request for a sandbox, for a block in which it is made."""
        record = self._sandboxes[sandbox_id] = _Record(spec, image, id_base)
        try:
            with self._note(sandbox_id, record) as keep:
                yield keep
        except BaseException:
            del self._sandboxes[sandbox_id]
            raise

    def made(self, sandbox_id: str, worker: Worker | None) -> None:
        """It is there; None: its worker has died since."""
        self._sandboxes[sandbox_id].worker = worker

    def adopt_sandbox(self, sandbox_id: str, note: SandboxNote, worker: Worker) -> None:
        """It was made by another process, and this worker has its note."""
        self._sandboxes[sandbox_id] = _Record(
            note.spec, note.image, note.id_base, note.resolv, worker
        )

    def note_sandbox(self, sandbox_id: str) -> None:
        """Replace its note."""
        record = self._sandboxes.get(sandbox_id)
        if record is not None and record.worker is not None:
            with self._note(sandbox_id, record) as keep:
                record.worker.keep_sandbox(sandbox_id, keep)

    def note_network(self, sandbox_id: str, spec: SandboxSpec, resolv: str | None) -> None:
        """Another policy is in force."""
        record = self._sandboxes.get(sandbox_id)
        if record is not None:
            record.spec, record.resolv = spec, resolv
            self.note_sandbox(sandbox_id)

    def have_network(self, sandbox_id: str, resolv: str | None) -> None:
        """Its policy is in force again; the node asks for the note when it has the record."""
        self._sandboxes[sandbox_id].resolv = resolv

    def drop_sandbox(self, sandbox_id: str) -> None:
        """Its note is not needed any more."""
        record = self._sandboxes.pop(sandbox_id, None)
        if record is not None and record.worker is not None:
            record.worker.drop(sandbox_id)

    def _note(self, sandbox_id: str, record: _Record) -> Noted:
        said, expires_at = self._notes.of_sandbox(sandbox_id)
        about = {
            "id_base": record.id_base,
            "upper": self.storage.name_of(sandbox_id),
            "resolv": record.resolv,
        }
        spec = wire.dump(record.spec, secrets=True)
        lines = [to_json(about), spec, _image_text(record.image), said]
        try:
            held = self.storage.kept(sandbox_id)
        except KeyError:  # it has ended
            held = ()
        return Noted(lines, held, expires_at)

    # --- commands ---------------------------------------------------------------------

    def starting(
        self, sandbox_id: str, operation_id: str, request: ExecRequest, pipes: CommandPipes
    ) -> Noted:
        """What goes with the request for a command, for a block in which it is sent."""
        said = self._notes.of_exec(sandbox_id, operation_id)
        names, held = pipes.kept_status
        about = "\t".join((sandbox_id, operation_id, *names)).encode()
        return Noted([about, wire.dump(request), said], held or None)

    def started(self, operation_id: str, execution: Execution, more: bytes | None = None) -> None:
        """It was asked for, or found, with what was noted `more`."""
        self._execs[operation_id] = execution.worker, execution.exec_id
        if more is not None:
            self._more.add(operation_id)
        execution.ended.then(lambda ended: self._ended(operation_id, ended))

    def _ended(self, operation_id: str, ended: Outcome[ExecEnd]) -> None:
        if ended.exception() is not None or operation_id not in self._execs:
            return
        if ended.result().spooled:
            self._spooled[operation_id] = None
            if len(self._spooled) > _MOST_SPOOLED:
                self.drop_exec(self._notes.give_up_exec(self._spooled))

    def note_exec(self, operation_id: str, more: bytes, due_at: float | None = None) -> None:
        """See `Keeps.note_exec`."""
        known = self._execs.get(operation_id)
        if known is not None:
            self._more.add(operation_id)
            worker, exec_id = known
            with Noted((more,), (), due_at) as keep:
                worker.keep_with_exec(f"{MORE}{exec_id}", exec_id, keep)

    def drop_exec(self, operation_id: str) -> None:
        """How it ended is not needed any more."""
        self._spooled.pop(operation_id, None)
        known = self._execs.pop(operation_id, None)
        if known is not None:
            worker, exec_id = known
            worker.drop(f"{EXEC}{exec_id}")
            if operation_id in self._more:
                self._more.remove(operation_id)
                worker.drop(f"{MORE}{exec_id}")


# --- notes as bytes -------------------------------------------------------------------


class Noted:
    """Some lines and descriptors to be kept, for a block in which that is asked for.

    Lines that are too long for a frame go as a descriptor of their own, before the others.
    """

    def __init__(
        self, lines: Sequence[bytes], held: Sequence[int] | None, expires_at: float | None = None
    ) -> None:
        note = b"\n".join(lines)
        self._fd = -1
        if len(note) > _MOST_BYTES:
            self._fd = _in_memory(note)
            note, held = b"", (self._fd, *(held or ()))
        self._keep = Keep(note, held, expires_at)

    def __enter__(self) -> Keep:
        return self._keep

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _in_memory(note: bytes) -> int:
    fd = os.memfd_create("coldframe-note", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, note, 0)  # to memory, so all of it at once
    except OSError:
        os.close(fd)
        raise
    return fd


def unpacked(note: bytes, held: Sequence[int]) -> tuple[list[bytes], list[int]]:
    """The lines of a note, and the descriptors without the note's own, which is closed."""
    rest = list(held)
    if not note:
        fd = rest.pop(0)
        note = os.pread(fd, os.fstat(fd).st_size, 0)
        os.close(fd)
    return note.split(b"\n"), rest


def read_sandbox(lines: Sequence[bytes]) -> SandboxNote:
    """What `Keeping` noted with a sandbox."""
    about = json.loads(lines[0])
    return SandboxNote(
        wire.load(SandboxSpec, lines[1]),
        _IMAGES.validate_json(lines[2]),
        about["id_base"],
        about["upper"],
        about["resolv"],
        lines[3],
    )


def read_exec(lines: Sequence[bytes]) -> ExecNote:
    """What `Keeping` noted with a command."""
    sandbox_id, operation_id, *pipes = lines[0].decode().split("\t")
    request = wire.load(ExecRequest, lines[1])
    return ExecNote(sandbox_id, operation_id, request, tuple(pipes), lines[2])


@lru_cache(64)
def _image_text(image: Image) -> bytes:
    return _IMAGES.dump_json(image)
