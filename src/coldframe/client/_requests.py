"""Make the values that cross the seam from what a caller gives; no I/O."""

from __future__ import annotations

import codecs
import signal as signals
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias, TypedDict, TypeVar

from pydantic import ValidationError

from coldframe.client._arguments import check_options
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.ids import check_operation_id, new_operation_id
from coldframe.protocol.models import (
    EventKind,
    ExecRequest,
    Model,
    PtySize,
    SandboxSpec,
    SignalScope,
)
from coldframe.protocol.text import encoded

Command: TypeAlias = str | bytes | Sequence[str | bytes]
"""Text is a command line for the shell; a list is argv and is never joined."""

Pty: TypeAlias = PtySize | tuple[int, int] | bool | None
"""A terminal's size as (rows, cols); True is 24 × 80."""

Env: TypeAlias = Mapping[str, str | None] | Mapping[str, str]


M = TypeVar("M", bound=Model)
E = TypeVar("E", bound=StrEnum)


class ExecOptions(TypedDict, total=False):
    """What may be said of a command. What is left out keeps the default of `ExecRequest`."""

    cwd: str | bytes | None
    """Default: the sandbox's workdir."""
    env: Env | None
    """Merged over the sandbox's; a null value removes."""
    user: str | int | None
    """Name or id, optionally `user:group`. Default: the sandbox's."""
    stdin: str | bytes | None
    """What the command reads. Default: end of file at once."""
    deadline_s: float | None
    """The whole tree is killed after so many seconds; None: never."""
    window_bytes: int
    """Per stream, how much the result carries: head and tail."""
    spool_bytes: int
    """Per stream, how much is kept on the node: head and tail."""
    kill_bytes: int | None
    """Kill the command when it has written more than this; None: never."""
    pty: Pty
    """Run on a terminal. Default: no."""
    shell: str
    """Runs a command line. Default: /bin/sh."""
    operation_id: str | None
    """The same id again gives the first result and runs nothing."""
    expected_version: int | None
    """Refuse with ConflictError if the sandbox has another version."""


class _Request(ExecOptions):
    command: Command
    stdin_open: bool
    status_pipe: bool


def checked(model: type[M], values: Mapping[str, Any]) -> M:
    """Make a model.

    Raises:
        InvalidRequestError: one sentence that names the first value that is wrong.
    """
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        given = f" (given: {str(first['input'])[:80]!r})" if where else ""
        raise InvalidRequestError(f"{where}: {what}{given}" if where else what) from None


def sandbox_spec(image: str, **given: Any) -> SandboxSpec:
    """Make a specification; None keeps the default, except for a lease (None: never ends)."""
    values = {key: value for key, value in given.items() if value is not None or key == "ttl_s"}
    return checked(SandboxSpec, {"image": image, **values})


def exec_request(
    command: Command,
    *,
    stdin_open: bool = False,
    stdin: str | bytes | None = None,
    env: Env | None = None,
    pty: Pty = None,
    operation_id: str | None = None,
    **options: Any,
) -> ExecRequest:
    """Make a request; it always carries an operation id, so that it can be cancelled by it.

    Raises:
        InvalidRequestError: a value is out of range, or of another type.
        TypeError: there is no such option.
    """
    named = {"stdin": stdin, "env": env, "pty": pty, "operation_id": operation_id}
    given = {name: value for name, value in named.items() if value is not None}
    check_options(_Request, {**options, "command": command, "stdin_open": stdin_open, **given})
    if isinstance(command, str | bytes):
        options["command"] = command
    else:
        options["argv"] = tuple(command)
    if pty is not None and pty is not False:
        options["pty"] = _pty_size(pty)
    if env:
        options["env"] = dict(env)
    if stdin is not None:
        options["stdin"] = encoded(stdin, "stdin")
    if operation_id is None:
        options["operation_id"] = new_operation_id()
    else:
        options["operation_id"] = check_operation_id(operation_id)
    return checked(ExecRequest, {**options, "stdin_open": stdin_open})


def _pty_size(pty: PtySize | tuple[int, int] | bool) -> PtySize:
    if isinstance(pty, PtySize):
        return pty
    if isinstance(pty, bool):
        return PtySize()
    rows, cols = pty
    return checked(PtySize, {"rows": rows, "cols": cols})


def check_codec(encoding: str, errors: str) -> None:
    """Refuse what Python cannot decode with, before anything is read.

    Raises:
        InvalidRequestError: there is no such encoding or error handler.
    """
    for name, known, value in (
        ("encoding", codecs.lookup, encoding),
        ("errors", codecs.lookup_error, errors),
    ):
        try:
            known(value)
        except (LookupError, ValueError):
            raise InvalidRequestError(f"{name}: there is no {value!r}") from None


def signal_scope(scope: SignalScope | str) -> SignalScope:
    """Return the scope of that name.

    Raises:
        InvalidRequestError: there is no such scope.
    """
    return _named(SignalScope, "scope", scope)


def _named(of: type[E], name: str, value: str) -> E:
    try:
        return of(value)
    except ValueError:
        known = ", ".join(of)
        raise InvalidRequestError(f"{name}: {value!r} is none of {known}") from None


def event_kind(kind: str) -> EventKind:
    """Return the kind of that name.

    Raises:
        InvalidRequestError: there is no such kind.
    """
    return _named(EventKind, "kind", kind)


def signal_number(signal: int | str) -> int:
    """Return the number of `TERM`, `SIGTERM` or 15.

    Raises:
        InvalidRequestError: there is no such signal.
    """
    if isinstance(signal, str):
        name = signal.upper()
        try:
            return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"].value
        except KeyError:
            raise InvalidRequestError(f"there is no signal {signal!r}") from None
    if not 0 < signal <= 64:
        raise InvalidRequestError(f"there is no signal {signal}")
    return int(signal)
