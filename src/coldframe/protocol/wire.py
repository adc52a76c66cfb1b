"""How requests, results and errors look between a client and the service: JSON and headers.

Arguments, paths and names may be bytes that are no UTF-8. In JSON such a byte is the lone surrogate
U+DC80 to U+DCFF (`"\\udcff"`), as Python's surrogateescape has it; in a URL it is percent-encoded.
"""

from __future__ import annotations

import base64
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError

from coldframe.protocol import PROTOCOL_VERSION, errors
from coldframe.protocol.errors import ColdframeError, Execution, InvalidRequestError
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    OutputChunk,
    SandboxInfo,
    SandboxSpec,
    SessionExecRequest,
    SessionRequest,
    SessionResult,
    Stream,
)
from coldframe.protocol.network import HIDDEN

SPOKEN_VERSIONS = (PROTOCOL_VERSION,)
"""Every version that this side can speak."""
ERROR_TRAILER = "coldframe-error"
"""Why an answer ends in the middle: an error's body, in an answer that is then cut."""
VERSION_HEADER = "Coldframe-Protocol"
"""What a client speaks, such as `1` or `1, 2`; in the answer the one that was chosen."""

LONGEST_POLL_S = 60.0
"""What one request may wait at most; whoever wants to wait longer asks again."""

M = TypeVar("M", bound=BaseModel)


@functools.lru_cache(maxsize=16)
def common_version(offered: str) -> int | None:
    """Return the newest version that is offered and spoken here; None: there is none."""
    theirs = {one.strip() for one in offered.split(",")}
    return max((ours for ours in SPOKEN_VERSIONS if str(ours) in theirs), default=None)


# --- JSON -----------------------------------------------------------------------------


def dump(model: BaseModel, *, secrets: bool = False) -> bytes:
    """Return a model as JSON; secrets of network policies are hidden unless asked for."""
    if not _is_odd(model):
        try:
            return model.__pydantic_serializer__.to_json(model, context={"secrets": secrets})
        except ValueError:  # text with lone surrogates
            pass
    shown = model.model_dump(mode="python")
    return json.dumps(_plain(shown, secrets)).encode("ascii")


def dump_all(models: Iterable[BaseModel]) -> bytes:
    """Return a JSON array of models."""
    return b"[" + b",".join(dump(model) for model in models) + b"]"


def _is_odd(model: BaseModel) -> bool:
    """Whether a model holds what pydantic would write as something else."""
    # By type, and words all at once: to ask `isinstance` of each takes as long as to write it.
    look = _LOOKS.get(type(model))
    return look is not None and look(model)


def _is_odd_request(model: ExecRequest) -> bool:
    words = (model.command, model.cwd, *(model.argv or ()))
    return bytes in map(type, words) or _is_odd_env(model.env)


def _is_odd_env(env: Mapping[Any, Any]) -> bool:
    return bytes in map(type, env.values()) or _are_odd_names(env)


def _are_odd_names(names: Iterable[str | bytes]) -> bool:
    if bytes in map(type, names):
        return True
    try:
        "".join(cast(Iterable[str], names)).encode()
    except UnicodeEncodeError:
        return True
    return False


_LOOKS: dict[type, Callable[[Any], bool]] = {
    ExecRequest: _is_odd_request,
    ExecResult: lambda model: _is_odd_request(model.request),
    SandboxInfo: lambda model: _is_odd(model.spec),
    SandboxSpec: lambda model: _are_odd_names((*model.env, *model.labels)),
    SessionExecRequest: lambda model: type(model.command) is bytes or _is_odd_env(model.env),
    SessionRequest: lambda model: type(model.cwd) is bytes or _is_odd_env(model.env),
    SessionResult: lambda model: _is_odd(model.result),
}


_CONTENT = frozenset({"stdin", "head", "tail"})
"""Fields that hold content rather than words: base64."""


def _plain(value: Any, secrets: bool, key: str = "") -> Any:
    if isinstance(value, bytes):
        return (
            base64.urlsafe_b64encode(value).decode("ascii")
            if key in _CONTENT
            else os.fsdecode(value)
        )
    if isinstance(value, SecretStr):
        return value.get_secret_value() if secrets else HIDDEN
    if isinstance(value, Mapping):
        # An environment has names of the caller's, which are no fields.
        return {
            _word(name): _plain(one, secrets, "" if key == "env" else _word(name))
            for name, one in value.items()
        }
    if isinstance(value, list | tuple | frozenset | set):
        return [_plain(one, secrets) for one in value]
    return value


def _word(value: str | bytes) -> str:
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


def load(kind: type[M], text: bytes) -> M:
    """Read what `dump` wrote.

    Raises:
        InvalidRequestError: it is no JSON of this kind; the message names the field.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        if b"\\ud" not in text.lower():
            raise InvalidRequestError(describe(error)) from error
    try:
        return kind.model_validate(_revived(json.loads(text)))
    except ValueError as error:
        raise InvalidRequestError(describe(error)) from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error


def load_all(kind: type[M], text: bytes) -> tuple[M, ...]:
    """Read what `dump_all` wrote."""
    try:
        return _many(kind).validate_json(text)
    except ValidationError as error:
        if b"\\ud" not in text.lower():
            raise InvalidRequestError(describe(error)) from error
    return _many(kind).validate_python(_revived(json.loads(text)))


@functools.cache
def _many(kind: type[M]) -> TypeAdapter[tuple[M, ...]]:
    return TypeAdapter(tuple[kind, ...])  # type: ignore[valid-type]  # made at run time


def _revived(value: Any, key: str = "") -> Any:
    """Decode content that is base64."""
    if isinstance(value, str) and key in _CONTENT:
        return base64.urlsafe_b64decode(value)
    if isinstance(value, dict):
        return {name: _revived(one, "" if key == "env" else name) for name, one in value.items()}
    if isinstance(value, list):
        return [_revived(one) for one in value]
    return value


def describe(error: ValueError) -> str:
    """Say in one sentence what does not fit, without repeating values: they may be secrets."""
    if not isinstance(error, ValidationError):
        return f"the body is no JSON: {error}"
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    return f"{where}: {first['msg']}"


# --- errors ---------------------------------------------------------------------------


def every_error(kind: type[ColdframeError] = ColdframeError) -> Iterator[type[ColdframeError]]:
    """Yield every class of error that is loaded, whatever room it is of."""
    yield kind
    for below in kind.__subclasses__():
        yield from every_error(below)


CODES: dict[str, type[ColdframeError]] = {
    kind.code: kind for kind in every_error() if kind.__module__ == errors.__name__
}
"""Every error class by its code."""


def error_body(error: ColdframeError, **more: Any) -> dict[str, Any]:
    """Return an error as JSON values."""
    return {
        "code": error.code,
        "message": str(error),
        "retryable": error.retryable,
        "side": error.side,
        "execution": error.execution,
        **more,
    }


def read_error(body: bytes, status: int) -> ColdframeError:
    """Return the error that an answer stands for; the same class as on the other side."""
    try:
        told = json.loads(body)
        code, message = str(told["code"]), str(told["message"])
        execution = Execution(told["execution"])
    except (ValueError, KeyError, TypeError):
        shown = body[:200].decode("utf-8", "replace")
        return ColdframeError(
            f"the service answered {status} with what is no error of ours: {shown!r}",
            execution=Execution.UNKNOWN,
        )
    error = CODES.get(code, ColdframeError)(message, execution=execution)
    if isinstance(error, errors.CursorExpiredError):
        oldest = told.get("oldest")
        error.oldest = None if oldest is None else str(oldest)
    return error


# --- output ---------------------------------------------------------------------------

OFFSET_HEADER = "Coldframe-Offset"
DROPPED_HEADER = "Coldframe-Dropped"
EOF_HEADER = "Coldframe-Eof"


def chunk_headers(chunk: OutputChunk) -> dict[str, str]:
    """Return what a chunk says besides its data."""
    return {
        OFFSET_HEADER: str(chunk.offset),
        DROPPED_HEADER: str(chunk.dropped_bytes),
        EOF_HEADER: "1" if chunk.eof else "0",
    }


def read_chunk(stream: Stream, headers: Mapping[str, str], data: bytes) -> OutputChunk:
    """Return the chunk of an answer; header names in lower case."""
    return OutputChunk(
        stream=stream,
        offset=int(headers[OFFSET_HEADER.lower()]),
        data=data,
        dropped_bytes=int(headers[DROPPED_HEADER.lower()]),
        eof=headers[EOF_HEADER.lower()] == "1",
    )
