"""What a command line says of a sandbox to make; a refusal speaks of its options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coldframe.cli import render
from coldframe.protocol.errors import InvalidRequestError

_OPTIONS = {
    "memory_bytes": "--memory",
    "disk_bytes": "--disk",
    "shm_bytes": "--shm",
    "ttl_s": "--ttl",
}
"""Of fields that are called otherwise on the command line."""
_NEVER = "never"
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NAME = "letters, digits, '.', '_' and '-', at most 63, the first a letter or digit"


def sandbox_options(
    image: str,
    *,
    memory: str | None,
    disk: str | None,
    shm: str | None,
    env: Iterable[str] | None,
    ttl: str | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return what `create_sandbox` takes, without what was not given.

    `ttl`: seconds, or `never`.

    Raises:
        InvalidRequestError: a value is out of range; the message names its option.
    """
    from pydantic import ValidationError

    from coldframe.protocol.models import SandboxSpec

    sizes = {"memory_bytes": memory, "disk_bytes": disk, "shm_bytes": shm}
    wanted = {
        **{name: render.parse_size(text) for name, text in sizes.items() if text is not None},
        "env": render.parse_env(env or ()),
        **others,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    if ttl is not None:
        given["ttl_s"] = _seconds(ttl)
    texts = {**sizes, "ttl_s": ttl}
    try:
        # Rules of a network become a policy later, and are refused one by one there.
        SandboxSpec(image=image, **{k: value for k, value in given.items() if k != "network"})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        if not field:
            raise InvalidRequestError(first["msg"].removeprefix("Value error, ")) from None
        said = texts.get(field) or given.get(field, image)
        option = _OPTIONS.get(field, f"--{field}")
        why = _why(field, first["msg"], first.get("ctx", {}))
        raise InvalidRequestError(f"{option} {said}: {why}") from None
    return given


def _seconds(ttl: str) -> float | None:
    try:
        return None if ttl == _NEVER else float(ttl)
    except ValueError:
        raise InvalidRequestError(f"--ttl {ttl!r}: a number of seconds, or {_NEVER}") from None


def _why(field: str, message: str, context: dict[str, Any]) -> str:
    if field == "name":
        return _NAME
    for bound, words in _BOUNDS.items():
        if bound in context:
            amount = context[bound]
            return f"{words} {render.size(amount) if '_bytes' in field else format(amount, 'g')}"
    return message.removeprefix("Value error, ")
