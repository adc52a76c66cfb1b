# Generated from _async/process.py; do not edit.
"""Commands that are not waited for, and output while it comes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from coldframe.client._arguments import typed_methods
from coldframe.client._requests import signal_number, signal_scope
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import MIB, ExecResult, OutputChunk, SignalScope, Stream
from coldframe.protocol.text import encoded

if TYPE_CHECKING:
    from coldframe.client._core import Streaming
    from coldframe.client._inside import SandboxCore
    from coldframe.client._portal import Portal


@typed_methods
class Process:
    """A command in the background, running or ended, known by its operation id.

    Nothing ends it but itself, a signal, its deadline or its sandbox's end; a handle may be
    dropped and had again with `attach`.

    What changes something takes an `operation_id` of its own: the same id again gives the first
    answer and changes nothing; it stands for nothing else (OperationMismatchError).

    Everything raises OperationNotFoundError and OperationExpiredError (its result is kept no
    longer); besides, what the client raises.
    """

    def __init__(self, core: SandboxCore, runner: Portal, operation_id: str) -> None:
        self._core, self._portal = core, runner
        self.operation_id = operation_id
        """What `attach` takes."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.operation_id} in {self._core.id}>"

    def wait(self) -> ExecResult:
        """Return how it ended, once it has, whoever still holds its pipes."""
        return self._portal.run(self._core.wait(self.operation_id))

    def poll(self) -> ExecResult | None:
        """Return how it ended, or None while it runs."""
        return self._portal.run(self._core.poll(self.operation_id))

    def read(
        self,
        stream: Stream = "stdout",
        cursor: int = 0,
        *,
        max_bytes: int = MIB,
        wait: bool = True,
    ) -> OutputChunk:
        """Return output from a byte offset on; `chunk.next_cursor` is what to ask for next.

        With `wait`, at least one byte or the end. `chunk.dropped_bytes` says what the spool no
        longer has.

        Raises:
            OutputNotKeptError: of a command that ended, what lies at `cursor` is kept no longer.
            InvalidRequestError: the stream is `status`, which the command was not asked for.
        """
        return self._portal.run(self._core.read(self.operation_id, stream, cursor, max_bytes, wait))

    def output(self, cursors: Mapping[Stream, int] | None = None) -> Iterator[OutputChunk]:
        """Iterate both streams as they come, from the start or from cursors, until it ends."""
        return self._portal.iterate(self._core.output(self.operation_id, cursors))

    def __iter__(self) -> Iterator[OutputChunk]:
        return self.output()

    def write_stdin(self, data: bytes | str, *, operation_id: str | None = None) -> None:
        """Write all of `data`, waiting while the pipe is full.

        Raises:
            InvalidRequestError: stdin was not asked to be open.
            StdinClosedError: nobody reads.
        """
        content = encoded(data, "what is written to stdin")
        self._portal.run(self._core.write_stdin(self.operation_id, content, operation_id))

    def close_stdin(self, *, operation_id: str | None = None) -> None:
        """Give it end of file. Twice is fine."""
        self._portal.run(self._core.close_stdin(self.operation_id, operation_id))

    def signal(
        self,
        signal: int | str,
        scope: SignalScope | str = SignalScope.GROUP,
        *,
        operation_id: str | None = None,
    ) -> int:
        """Send a signal by number or name; return how many processes it reached.

        Args:
            signal: 15, `TERM` or `SIGTERM`.
            scope: `leader`, `group`, `tree` (daemonised ones too) or `children`.
        Raises:
            InvalidRequestError: there is no such signal, or no such scope.
        """
        number = signal_number(signal)
        where = signal_scope(scope)
        sending = self._core.signal(self.operation_id, number, where, operation_id)
        return self._portal.run(sending)

    def kill(self) -> ExecResult:
        """Kill it and everything that it started; return how it ended."""
        return self._portal.run(self._core.kill(self.operation_id))

    def resize(self, rows: int, cols: int, *, operation_id: str | None = None) -> None:
        """Set the size of its terminal. Raises InvalidRequestError: it has none."""
        self._portal.run(self._core.resize(self.operation_id, rows, cols, operation_id))

    def forget(self) -> None:
        """Let the node drop its kept output. What it left running goes on."""
        self._portal.run(self._core.forget(self.operation_id))


class OutputStream:
    """A command in the foreground: iterate its output, then ask for `result`.

    Leaving the loop early, or the `with` block, kills the command and all that it started.
    """

    def __init__(self, runner: Portal, streaming: Streaming) -> None:
        self._streaming = streaming
        self._chunks: Generator[OutputChunk, None] = runner.iterate(streaming.run())

    @property
    def operation_id(self) -> str:
        """The operation that the command is."""
        return self._streaming.operation_id

    @property
    def result(self) -> ExecResult:
        """How it ended.

        Raises:
            InvalidRequestError: it has not been iterated to its end.
        """
        if self._streaming.result is None:
            raise InvalidRequestError("the output has not been iterated to its end yet")
        return self._streaming.result

    def __iter__(self) -> Iterator[OutputChunk]:
        return self._iterate()

    def _iterate(self) -> Iterator[OutputChunk]:
        try:
            yield from self._chunks
        finally:
            self._chunks.close()

    def close(self) -> None:
        """Stop: kill the command if it still runs."""
        self._chunks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
