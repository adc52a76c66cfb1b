# Generated from _async/session.py; do not edit.
"""A persistent shell as an object."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from coldframe.client._arguments import typed_methods
from coldframe.protocol.models import ExecResult, SessionInfo

if TYPE_CHECKING:
    from coldframe.client._portal import Portal
    from coldframe.client._sessions import SessionCore


@typed_methods
class Session:
    """A shell that lives on: `cd`, variables, functions and traps persist between commands.

    Commands run one after another, read end of file, and give their true exit code. What
    background jobs write is part of the command during which, or before which, it came. It is the
    node's: a client that is lost loses nothing of it.

    Everything raises OperationNotFoundError and OperationExpiredError (it is known no longer);
    besides, what the client raises.
    """

    def __init__(self, core: SessionCore, runner: Portal) -> None:
        self._core, self._portal = core, runner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.operation_id}>"

    @property
    def operation_id(self) -> str:
        """The operation that the shell is: by it `attach_session` finds the session again."""
        return self._core.info.id

    @property
    def ended(self) -> ExecResult | None:
        """How the shell ended, as was last heard; None: it takes commands."""
        return self._core.info.ended

    def refresh(self) -> SessionInfo:
        """Ask the node what it knows of the session now: what runs in it, how it ended."""
        return self._portal.run(self._core.refresh())

    def exec(
        self,
        command: str | bytes,
        *,
        env: Mapping[str, str] | None = None,
        deadline_s: float | None = 300.0,
        window_bytes: int | None = None,
        operation_id: str | None = None,
    ) -> ExecResult:
        """Run one command line in the shell; background jobs do not hold the call.

        `exit`, or an error under `set -e`, ends the shell: its code is in the result, and
        `ended` is set. At the deadline the command and all background jobs are killed; the
        shell lives on if it can.

        Args:
            command: any number of lines.
            env: variables for this command alone.
            deadline_s: None: never.
            window_bytes: per stream, how much the result carries; None: the session's.
            operation_id: the same id again gives the first result and runs nothing; `attach`
                reads the output of the command as it comes.
        Raises:
            SessionEndedError: the shell had ended before.
            InvalidRequestError: the command cannot be a command line, or a name no variable.
        """
        return self._portal.run(
            self._core.exec(command, env, deadline_s, window_bytes, operation_id)
        )

    def close(self) -> None:
        """End the shell. Twice is fine. Background jobs live on, as with `exec`."""
        self._portal.run(self._core.close(kill=False))

    def kill(self) -> None:
        """Kill the shell and everything that it started."""
        self._portal.run(self._core.close(kill=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
