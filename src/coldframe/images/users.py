"""Turn `user[:group]` into ids by the image's own /etc/passwd and /etc/group."""

from __future__ import annotations

import re
from collections.abc import Iterator

from coldframe.images.digest import MAX_ID
from coldframe.images.view import MergedView
from coldframe.protocol.errors import ImageError

_NUMBER = re.compile(r"[0-9]{1,10}")


def resolve_owner(view: MergedView, owner: str) -> tuple[int, int]:
    """Return uid and gid. A lone number is both; a lone name has the group of its account.

    Raises:
        ImageError: no such user or group in the image, or an id above 65535.
    """
    user, _, group = owner.partition(":")
    if _NUMBER.fullmatch(user):
        uid = gid = int(user)
    else:
        uid, gid = _account(view, user)
    if group:
        gid = int(group) if _NUMBER.fullmatch(group) else _group(view, group)
    if uid > MAX_ID or gid > MAX_ID:
        raise ImageError(f"{owner!r}: an image holds the ids 0 to {MAX_ID} only")
    return uid, gid


def _account(view: MergedView, name: str) -> tuple[int, int]:
    for fields in _lines(view, b"etc/passwd"):
        if fields[0] == name and len(fields) >= 4 and all(map(_NUMBER.fullmatch, fields[2:4])):
            return int(fields[2]), int(fields[3])
    raise ImageError(f"no user {name!r} in the image's /etc/passwd")


def _group(view: MergedView, name: str) -> int:
    for fields in _lines(view, b"etc/group"):
        if fields[0] == name and len(fields) >= 3 and _NUMBER.fullmatch(fields[2]):
            return int(fields[2])
    raise ImageError(f"no group {name!r} in the image's /etc/group")


def _lines(view: MergedView, path: bytes) -> Iterator[list[str]]:
    content = view.read(path) or b""
    for line in content.decode("utf-8", "replace").split("\n"):
        yield line.split(":")
