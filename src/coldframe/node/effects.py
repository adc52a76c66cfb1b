"""Changes that were asked for under an id, so that none is made twice.

All but creates and commands, which are noted with what they made. They stand in a journal in the
node's directory, which the next process reads: a line before a change, and one with its answer
after it. What was begun and has no answer there may have been done; it is not done again, and
whoever asks is told so.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coldframe.host.outcome import Outcome
from coldframe.protocol.errors import Execution, ServiceUnreachableError, StorageFullError
from coldframe.protocol.wire import error_body

if TYPE_CHECKING:
    from coldframe.node.operations import Operations

FILE = "effects"
_RECORD_BYTES = 512
"""What one weighs besides its answer."""
_REWRITE_BYTES = 64 << 20
"""After how much a journal is written anew, with what is still known."""


@dataclass(frozen=True)
class Reply:
    """What was answered."""

    status: int
    kind: str | None
    """Media type."""
    content: bytes
    body_sha256: str | None = None
    """Of the request's body; None: not all of it was read."""
    final: bool = True
    """Whether it is the answer for ever; else nothing was done, and the id may be used again."""


@dataclass(frozen=True)
class Returned:
    """What a caller in this process was given; no other process is told."""

    value: Any = None
    error: BaseException | None = None
    body_sha256: str | None = None
    """Of the content that came with it; None: not all of it was read."""
    final: bool = True
    """As of `Reply`."""
    content = b""


R = TypeVar("R", Reply, Returned)


@dataclass(eq=False)
class EffectOperation:
    """One change: being made, or answered."""

    id: str
    asked: str
    """What tells it from others, but for the body."""
    owner: str | None
    ended: Outcome[Any]
    """A `Reply` or `Returned`, as was asked."""
    ended_unix: float | None = None
    """When it ended, if that was in another process; Unix seconds."""
    ended_at: float = 0.0
    size: int = _RECORD_BYTES


class Effects:
    """See the module."""

    def __init__(self, operations: Operations, path: Path | None) -> None:
        """Go on with what the journal holds; without a path there is none.

        Raises OSError: it cannot be opened, or made where there was none.
        """
        self._operations, self._path = operations, path
        self._fd: int | None = None
        self._written = 0
        if path is not None:
            self._go_on(path)
            try:
                self._rewrite(path)
            except (OSError, StorageFullError):  # a full disk stops no node's start
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    async def once(
        self,
        operation_id: str,
        asked: str,
        owner: str | None,
        act: Callable[[], Awaitable[R]],
        lost: R,
    ) -> R:
        """Return the first answer to this id, which `act` gives; `lost` if it does not.

        Raises:
            OperationMismatchError: the id stands for something else.
            OperationExpiredError: the id is older than answers are kept.
            StorageFullError: no space is left for the journal; nothing was done.
        """
        while (known := self._operations.find_effect(operation_id, asked)) is not None:
            reply: R = await known.ended
            if reply.final:
                return reply
        operation = EffectOperation(operation_id, asked, owner, Outcome())
        self._note({"id": operation_id, "asked": asked, "owner": owner, "at": time.time()})
        self._operations.add(operation)
        reply = lost
        try:
            reply = await act()
        finally:
            self._end(operation, reply)
        return reply

    def close(self) -> None:
        """Close the journal; it stays. Twice is fine."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _end(self, operation: EffectOperation, reply: Reply | Returned) -> None:
        operation.ended.set_result(reply)
        if not reply.final:
            self._operations.drop(operation)  # before any that wait go on, and try themselves
        else:
            operation.size += len(reply.content)
            self._operations.end(operation)
        with suppress(StorageFullError):  # the next process then does not know the answer
            self._note(_ended(operation))
        if self._path is not None and self._written > _REWRITE_BYTES:
            with suppress(OSError):  # the old one is good
                self._rewrite(self._path)

    def _note(self, told: dict[str, Any]) -> None:
        if self._fd is None:
            return
        line = json.dumps(told).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise StorageFullError(
                f"no space is left for {self._path}: {error.strerror}; make room there"
            ) from error
        self._written += written
        if written < len(line):
            raise StorageFullError(f"no space is left for {self._path}; make room there")

    def _go_on(self, path: Path) -> None:
        begun: dict[str, EffectOperation] = {}
        for told in _lines(path):
            if "asked" in told:
                begun[told["id"]] = EffectOperation(
                    told["id"], told["asked"], told["owner"], Outcome(), told["at"]
                )
            elif (operation := begun.get(told["id"])) is not None:
                if told["status"] is None:
                    del begun[told["id"]]
                    continue
                operation.ended_unix = told["at"]
                content = b64decode(told["content"])
                operation.ended.set_result(
                    Reply(told["status"], told["kind"], content, told["body_sha256"])
                )
                operation.size += len(content)
        for operation in begun.values():
            if self._operations.is_over(operation.id):
                continue
            if not operation.ended.done():
                operation.ended.set_result(lost_reply())
            self._operations.add(operation)
            self._operations.end(operation)

    def _rewrite(self, path: Path) -> None:
        fresh = path.with_name(f"{path.name}.new")  # a kill, or a full disk, costs nothing
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(fresh, flags, 0o600)
        old, self._fd, before = self._fd, fd, self._written
        self._written = 0
        try:
            for one in self._operations.effects():
                at = one.ended_unix or time.time()
                self._note({"id": one.id, "asked": one.asked, "owner": one.owner, "at": at})
                if one.ended.done():
                    self._note(_ended(one))
            fresh.replace(path)
        except (OSError, StorageFullError):
            self._fd, self._written = old, before
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        if old is not None:
            os.close(old)


def _ended(operation: EffectOperation) -> dict[str, Any]:
    reply = operation.ended.result()
    at = operation.ended_unix or time.time()
    if not reply.final:
        return {"id": operation.id, "status": None, "at": at}
    if isinstance(reply, Returned):
        reply = lost_reply()
    return {
        "id": operation.id,
        "status": reply.status,
        "kind": reply.kind,
        "content": b64encode(reply.content).decode(),
        "body_sha256": reply.body_sha256,
        "at": at,
    }


def lost() -> ServiceUnreachableError:
    """Return what is known of a change that was begun and has no answer."""
    return ServiceUnreachableError(
        "the service or this request ended while it was being done; whether it was is not known",
        execution=Execution.UNKNOWN,
    )


def lost_reply() -> Reply:
    """Return `lost` as an answer."""
    return Reply(503, "application/json", json.dumps(error_body(lost())).encode())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        with suppress(ValueError):  # one that was cut
            yield json.loads(line)
