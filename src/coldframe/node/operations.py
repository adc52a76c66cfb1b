"""What was asked for under which operation id, so that nothing runs twice.

An operation is known while it runs and for `result_ttl_s` after its end, as long as no more than
`result_count` results with `result_bytes` of output are kept: who has most of them loses first.
After that only its id is known, to be refused; at most `expired_ids` of those are remembered,
by the same rule.
"""

from __future__ import annotations

import asyncio
import shlex
import signal as signals
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from coldframe.host.outcome import Outcome
from coldframe.node.effects import EffectOperation
from coldframe.node.expired import ExpiredIds
from coldframe.node.legacy import Legacy
from coldframe.node.life import Sandbox
from coldframe.node.pool import Pool
from coldframe.node.settings import NodeSettings
from coldframe.protocol import tracing, wire
from coldframe.protocol.errors import (
    ColdframeError,
    Execution,
    OperationExpiredError,
    OperationMismatchError,
    OperationNotFoundError,
)
from coldframe.protocol.models import (
    ExecInfo,
    ExecRequest,
    ExecResult,
    Reason,
    SandboxInfo,
    SandboxSpec,
)
from coldframe.runtimes.base import RunningExec

_RECORD_BYTES = 2048
"""What a result weighs besides its output."""
_CHANGES_BYTES = 16 << 20
"""Answers to changes that are kept."""
_LISTED = 1000
"""Commands of a sandbox that are listed at most."""
_LONGEST_LINE = 1000
"""Characters of a command line that are listed."""


@dataclass(eq=False, slots=True)
class CreateOperation:
    """A create that may be asked for again."""

    id: str
    request: SandboxSpec
    ended: Outcome[SandboxInfo]
    ended_unix: float | None = None
    """When it ended, if that was in another process; Unix seconds."""
    ended_at: float = 0.0
    size: int = 0
    """What its record holds, about."""

    def __post_init__(self) -> None:
        self.size = _RECORD_BYTES + len(wire.dump(self.request))

    @property
    def owner(self) -> str | None:
        """Whose it is, if the labels say so."""
        return self.request.owner


@dataclass(eq=False, slots=True)
class ExecOperation:
    """One command: waiting for its turn, running, or ended."""

    id: str
    sandbox: Sandbox
    request: ExecRequest
    started: Outcome[None] = field(init=False, default_factory=Outcome)
    """Done when the command runs; never raises."""
    ended: Outcome[ExecResult] = field(init=False)
    task: asyncio.Task[None] | None = None
    """What leads to its end; None: it has ended."""
    running: RunningExec | None = None
    """Kept after the end while there is more to read than the result holds."""
    held: int = 0
    """What it counts for in its owner's share while it runs."""
    spool_bytes: int = 0
    """What its output counts for in its sandbox's share, both streams together."""
    totals: tuple[int, int] = (0, 0)
    """Bytes of stdout and stderr with what its leftovers wrote, once they have ended."""
    trace_id: str | None = field(default_factory=tracing.current)
    queued_s: float = 0.0
    """How long it waited for its turn."""
    began_at: float = 0.0
    """Unix seconds at which the runtime, or its shell, was asked to start it; 0: not yet."""
    abandoned: bool = False
    """Whether its sandbox ended and nothing was heard of the command since."""
    ended_unix: float | None = None
    """When it ended, if that was before this process knew of it; Unix seconds."""
    ended_at: float = 0.0
    cancelled: bool = False
    """Whether it was to end before it ran."""
    size: int = 0
    """What its record holds, about; with the output once it has ended."""

    def __post_init__(self) -> None:
        self.size = _weigh(self.request)

    @property
    def owner(self) -> str | None:
        """Whose it is."""
        return self.sandbox.owner

    @property
    def dispatched(self) -> bool:
        """Whether it was asked to be started: it may have run."""
        return self.began_at > 0

    def info(self) -> ExecInfo:
        """Return how far it has come."""
        info = ExecInfo(
            operation_id=self.id,
            command_line=_command_line(self.request),
            started_at=None if self.running is None else self.began_at,
        )
        if not self.ended.done():
            return info
        error = self.ended.exception()
        if error is not None:
            return info.model_copy(update={"failure": str(error) or "it was lost"})
        result = self.ended.result()
        names = ("started_at", "reason", "exit_code", "signal")
        return info.model_copy(update={name: getattr(result, name) for name in names})


Operation = CreateOperation | ExecOperation | EffectOperation


class Operations:
    """All operations that are known by id."""

    def __init__(
        self,
        settings: NodeSettings,
        expired: ExpiredIds | None = None,
        legacy: Legacy | None = None,
    ) -> None:
        """Refuse ids that are `expired` already; `legacy` is told what is kept no longer."""
        self._settings = settings
        self._known: dict[str, Operation] = {}
        self._ended: Pool[Operation] = Pool(settings.result_count, settings.result_bytes)
        # Apart: a program that writes much to a command's stdin must not cost it its results.
        self._changed: Pool[Operation] = Pool(settings.result_count, _CHANGES_BYTES)
        self._expired = ExpiredIds(settings.expired_ids) if expired is None else expired
        self._legacy = Legacy() if legacy is None else legacy
        self._legacy.on_dropped = self._on_dropped
        self._legacy.surplus = self._surplus
        self.on_expire: Callable[[ExecOperation], None] = lambda _: None
        """Told of a command whose result is kept no longer."""

    def __len__(self) -> int:
        return len(self._known)

    def find_exec(self, sandbox: Sandbox, request: ExecRequest) -> ExecOperation | None:
        """Return the operation of the request's id, if the request is the same.

        Raises:
            OperationMismatchError: the id stands for another request.
            OperationExpiredError: the id is older than results are kept.
        """
        assert request.operation_id is not None
        operation = self._find(request.operation_id)
        if operation is None:
            return None
        if (
            not isinstance(operation, ExecOperation)
            or operation.sandbox is not sandbox
            or _essence(operation.request) != _essence(request)
        ):
            raise mismatch(operation.id)
        return operation

    def find_create(self, operation_id: str, spec: SandboxSpec) -> CreateOperation | None:
        """Return the create of that id, if it asked for the same. Raises as `find_exec`."""
        operation = self._find(operation_id)
        if operation is None:
            return None
        if not isinstance(operation, CreateOperation) or operation.request != spec:
            raise mismatch(operation_id)
        return operation

    def find_effect(self, operation_id: str, asked: str) -> EffectOperation | None:
        """Return the change of that id, if it was asked for so. Raises as `find_exec`."""
        operation = self._find(operation_id)
        if operation is None:
            return None
        if not isinstance(operation, EffectOperation) or operation.asked != asked:
            raise mismatch(operation_id)
        return operation

    def effects(self) -> list[EffectOperation]:
        """Return every change that is known, oldest first."""
        return [one for one in self._known.values() if isinstance(one, EffectOperation)]

    def get(self, operation_id: str) -> ExecOperation:
        """Return a command's operation.

        Raises:
            OperationNotFoundError: no command has, or is remembered to have had, this id.
            OperationExpiredError: it ended too long ago.
        """
        operation = self._find(operation_id)
        if not isinstance(operation, ExecOperation):
            raise OperationNotFoundError(f"no exec has the operation id {operation_id!r}")
        return operation

    def of_sandbox(self, sandbox: Sandbox) -> list[ExecOperation]:
        """Return the newest commands of a sandbox that are known, oldest first."""
        self._prune()
        found = (
            one
            for one in reversed(self._known.values())
            if isinstance(one, ExecOperation) and one.sandbox is sandbox
        )
        return list(islice(found, _LISTED))[::-1]

    def add(self, operation: Operation) -> None:
        """Know an operation from now on."""
        self._known[operation.id] = operation

    def drop(self, operation: Operation) -> None:
        """Forget an operation that was refused before anything ran: its id may be used again."""
        self._known.pop(operation.id, None)
        if isinstance(operation, ExecOperation):
            self._legacy.drop_exec(operation.id)

    def go_on_create(self, sandbox: Sandbox) -> None:
        """Know the create of a sandbox that another process made."""
        assert sandbox.operation_id is not None
        ended: Outcome[SandboxInfo] = Outcome()
        ended.set_result(sandbox.as_made())
        operation = CreateOperation(sandbox.operation_id, sandbox.asked or sandbox.spec, ended)
        operation.ended_unix = sandbox.ready_at or sandbox.created_at
        self.add(operation)
        self.end(operation)

    def is_over(self, operation_id: str) -> bool:
        """Whether an id is one to be refused."""
        return operation_id in self._expired

    def refuse(self, operation_id: str, owner: str | None) -> None:
        """Refuse an id of an owner's once its operation is not known, in the next process too."""
        self._expired.add(operation_id, owner)

    def _on_dropped(self, operation_id: str) -> None:
        if operation_id in self._known:  # else it is refused already
            self.refuse(operation_id, self._known[operation_id].owner)

    def _surplus(self, operation_ids: Collection[str]) -> str:
        """The oldest of the owner that has most of these."""
        owners = {one: self._known[one].owner for one in operation_ids if one in self._known}
        ((most, _),) = Counter(owners.values()).most_common(1) or [(None, 0)]
        return next(one for one in operation_ids if owners.get(one) == most)

    def end(self, operation: Operation) -> None:
        """Keep an ended operation's result for its time, and let older ones go."""
        ago = 0.0 if operation.ended_unix is None else time.time() - operation.ended_unix
        operation.ended_at = time.monotonic() - max(0.0, ago)
        self._pool_of(operation).add(operation, operation.size)
        self._prune()

    def settle(self, operation: Operation, ended: Outcome[Any]) -> None:
        """Keep how an operation ended, unless nothing ran and it may well succeed later."""
        if isinstance(operation, ExecOperation) and ended.exception() is None:
            operation.size += _output_bytes(ended.result())
        error = ended.exception()
        if error is None or not may_run_again(error):
            self.end(operation)
        else:
            self.drop(operation)

    def _find(self, operation_id: str) -> Operation | None:
        self._prune()
        operation = self._known.get(operation_id)
        if operation is None and operation_id in self._expired:
            raise OperationExpiredError(
                f"operation {operation_id!r}: its result is kept no longer "
                f"(at most {self._settings.result_ttl_s:g} s), and it is not run again"
            )
        return operation

    def _prune(self) -> None:
        oldest_kept = time.monotonic() - self._settings.result_ttl_s
        for pool in (self._ended, self._changed):
            while (oldest := next(iter(pool), None)) and oldest.ended_at <= oldest_kept:
                self._expire(oldest)
            while surplus := pool.surplus():
                self._expire(surplus)

    def _pool_of(self, operation: Operation) -> Pool[Operation]:
        return self._changed if isinstance(operation, EffectOperation) else self._ended

    def _expire(self, operation: Operation) -> None:
        self._pool_of(operation).remove(operation)
        self._known.pop(operation.id, None)
        share = operation.owner
        if isinstance(operation, EffectOperation):
            share = f"{share}'s changes"  # they crowd out each other's ids alone
        self.refuse(operation.id, share)
        if isinstance(operation, ExecOperation):
            self.on_expire(operation)
            self._legacy.drop_exec(operation.id)


def _command_line(request: ExecRequest) -> str:
    words = (request.command,) if request.argv is None else request.argv
    assert words[0] is not None
    texts = [_text(word) for word in words if word is not None]
    line = shlex.join(texts) if request.argv is not None else texts[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _text(word: str | bytes) -> str:
    data = word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape")
    return data[: 4 * _LONGEST_LINE].decode("utf-8", "replace")


def may_run_again(error: BaseException) -> bool:
    """Whether nothing was done, and may well be when it is asked for again."""
    return isinstance(error, asyncio.CancelledError) or (
        isinstance(error, ColdframeError)
        and error.retryable
        and error.execution is Execution.NOT_EXECUTED
    )


def _essence(request: ExecRequest) -> ExecRequest:
    """What makes two requests the same: all but the version that was expected at the time."""
    return request.model_copy(update={"expected_version": None})


def mismatch(operation_id: str) -> OperationMismatchError:
    """Return what refuses an id that stands for something else."""
    return OperationMismatchError(
        f"operation id {operation_id!r} was used for a different request; use a new id"
    )


def _weigh(request: ExecRequest) -> int:
    """How many bytes a kept request holds, about."""
    texts = (request.stdin, request.command, request.cwd, request.shell, *(request.argv or ()))
    words = filter(None, (*texts, *request.env, *request.env.values()))
    return _RECORD_BYTES + sum(map(len, words)) + len(str(request.user))


def _output_bytes(result: ExecResult) -> int:
    out, err = result.out, result.err
    return len(out.head) + len(out.tail) + len(err.head) + len(err.tail)


def never_ran(operation: ExecOperation) -> ExecResult:
    """Return how a command ends that was cancelled while it waited for its turn."""
    now = time.time()
    return ExecResult(
        operation_id=operation.id,
        sandbox_id=operation.sandbox.id,
        reason=Reason.SIGNAL,
        signal=int(signals.SIGKILL),
        started_at=now,
        ended_at=now,
        duration_s=0.0,
        request=operation.request,
        trace_id=operation.trace_id,
    )
