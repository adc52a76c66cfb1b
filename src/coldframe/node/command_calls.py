"""What a node is asked about commands: begun, awaited, read, written to, ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coldframe.host.outcome import Outcome
from coldframe.node.opening import OpenNode
from coldframe.node.sessions import Sessions
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    OutputChunk,
    SignalScope,
    Stream,
)


class CommandCalls(OpenNode):
    """See `Node`."""

    async def exec(self, id_or_name: str, request: ExecRequest) -> ExecResult:
        """Run a command and return how it ended.

        It goes on when the caller is cancelled: ask again with the same operation id, or delete
        the sandbox.

        Raises:
            NotExecutedError and its kin: it was not started.
            CapacityError: too much is running or waiting.
            OperationMismatchError, OperationExpiredError: see `Operations`.
        """
        return await self._works.execs.begin(self._find(id_or_name), request).ended

    def begin_exec(
        self,
        id_or_name: str,
        request: ExecRequest,
        told: Callable[[ExecResult | BaseException], None],
    ) -> Callable[[], None]:
        """As `exec`; `told` gets how it ended, or what it failed with, as soon as it is known.

        Returns what to call when nobody wants to be told any more.
        """
        ended = self._works.execs.begin(self._find(id_or_name), request).ended

        def tell(known: Outcome[ExecResult]) -> None:
            told(known.exception() or known.result())

        ended.then(tell)
        return partial(ended.forget, tell)

    async def start_exec(self, id_or_name: str, request: ExecRequest) -> str:
        """Start a command; return its operation id once it runs. Raises as `exec`."""
        operation = self._works.execs.begin(self._find(id_or_name), request)
        await self._works.execs.until_started(operation)
        return operation.id

    async def wait_exec(self, operation_id: str) -> ExecResult:
        """Return how a command ended, once it has.

        Raises:
            OperationNotFoundError, OperationExpiredError: see `Operations`.
        """
        return await self._works.operations.get(operation_id).ended

    async def poll_exec(self, operation_id: str) -> ExecResult | None:
        """Return how a command ended, None while it runs. Raises as `wait_exec`."""
        ended = self._works.operations.get(operation_id).ended
        return ended.result() if ended.done() else None

    def exec_started(self, operation_id: str) -> bool:
        """Whether a command is known to run, or to have ended. Raises as `wait_exec`."""
        return self._works.operations.get(operation_id).started.done()

    async def read_output(
        self,
        operation_id: str,
        stream: Stream = "stdout",
        cursor: int = 0,
        max_bytes: int = 1 << 20,
        wait: bool = True,
    ) -> OutputChunk:
        """Return bytes of a stream from a cursor on; with `wait`, at least one byte or eof."""
        return await self._works.execs.read(operation_id, stream, cursor, max_bytes, wait)

    async def write_stdin(self, operation_id: str, data: bytes) -> None:
        """Write to a command's stdin. Raises as `RunningExec.write_stdin`."""
        await self._works.execs.write_stdin(operation_id, data)

    async def close_stdin(self, operation_id: str) -> None:
        """Give a command end of file. Twice, or after its end, is fine."""
        await self._works.execs.close_stdin(operation_id)

    async def signal(
        self, operation_id: str, signum: int, scope: SignalScope = SignalScope.GROUP
    ) -> int:
        """Send a signal; return how many processes it reached (0: it had ended)."""
        return await self._works.execs.signal(operation_id, signum, scope)

    async def cancel_exec(self, operation_id: str) -> None:
        """Kill a command and all that it started; twice, or after its end, is fine.

        One that waits for its turn never runs.

        Raises:
            OperationNotFoundError, OperationExpiredError: see `Operations`.
            NotExecutedError and its kin: it was never started.
        """
        await self._works.execs.cancel(operation_id)

    async def resize(self, operation_id: str, rows: int, cols: int) -> None:
        """Set the size of a command's terminal."""
        await self._works.execs.resize(operation_id, rows, cols)

    async def mark(self, operation_id: str) -> tuple[int, int]:
        """Drain what is in the pipes now; return the totals of stdout and stderr."""
        return await self._works.execs.mark(operation_id)

    async def forget(self, operation_id: str) -> None:
        """Drop an ended command's kept output. Its result stays, what it left running goes on."""
        await self._works.execs.forget(operation_id)

    def sessions(self) -> Sessions:
        """Return the sessions of all sandboxes."""
        return self._works.sessions
