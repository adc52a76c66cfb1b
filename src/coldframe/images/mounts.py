"""RUN --mount: what one step sees and the image does not keep.

A mount is a layer that lies above the image while the step runs (`bind`: files of the context,
of a stage or an image; `cache` and `tmpfs`: an empty directory). What the step writes there is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coldframe.images.dockerfile import Instruction
from coldframe.images.variables import WordError, expand

_ALIASES = {
    "dst": "target",
    "destination": "target",
    "src": "source",
    "readonly": "ro",
    "readwrite": "rw",
}
_KEYS = {
    "bind": ("target", "source", "from", "ro", "rw"),
    "cache": ("target", "id", "sharing", "mode", "uid", "gid", "ro"),
    "tmpfs": ("target", "size"),
}


@dataclass(frozen=True)
class Mount:
    """One mount, variables replaced."""

    kind: str
    target: str
    """A path in the image, absolute or relative to the working directory."""
    source: str = ""
    """Of `bind`: a path in what it is from."""
    origin: str = ""
    """Of `bind`: a stage or an image; empty: the build context."""
    mode: int = 0o755
    uid: int = 0
    gid: int = 0


def mounted_from(line: Instruction) -> Iterator[str]:
    """Yield the stages or images that a RUN line's mounts are from; variables are none there."""
    for text in line.mounts:
        yield from (field[5:] for field in text.split(",") if field.startswith("from="))


def mounts(line: Instruction, env: Mapping[str, str]) -> tuple[Mount, ...]:
    """Return the mounts of a RUN line.

    Raises:
        WordError: one that is not well formed, or that cannot be honoured.
    """
    return tuple(_mount(text, env, line.escape) for text in line.mounts)


def _mount(text: str, env: Mapping[str, str], escape: str) -> Mount:
    fields: dict[str, str] = {}
    if text[0] in "\"'" and text.endswith(text[0]):
        text = text[1:-1]
    for field in text.split(","):
        key, _, value = field.partition("=")
        key = key.strip().lower()
        fields[_ALIASES.get(key, key)] = value if key == "from" else expand(value, env, escape)
    kind = fields.pop("type", "bind")
    if kind not in _KEYS:
        why = (
            "an image is built from what is in it" if kind in ("secret", "ssh") else "no such type"
        )
        raise WordError(
            f"RUN --mount=type={kind} is not supported ({why}); there are: {', '.join(_KEYS)}"
        )
    for key in fields:
        if key not in _KEYS[kind]:
            raise WordError(f"RUN --mount=type={kind} with {key!r} is not supported; remove it")
    if "$" in fields.get("from", ""):
        raise WordError(f"RUN --mount: from={fields['from']} may hold no variable")
    if not fields.get("target"):
        raise WordError(f"RUN --mount={text} needs target=PATH")
    return Mount(
        kind,
        fields["target"],
        source=fields.get("source", ""),
        origin=fields.get("from", ""),
        mode=_number(fields, "mode", 8, 0o755),
        uid=_number(fields, "uid", 10, 0),
        gid=_number(fields, "gid", 10, 0),
    )


def _number(fields: Mapping[str, str], key: str, base: int, default: int) -> int:
    text = fields.get(key)
    if text is None:
        return default
    if not re.fullmatch(r"[0-7]{1,5}" if base == 8 else r"[0-9]{1,5}", text):
        raise WordError(f"RUN --mount: {key}={text} is no number")
    return int(text, base)
