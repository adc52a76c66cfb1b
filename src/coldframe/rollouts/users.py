"""Who a user of a sandbox is, by number, read from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, NotExecutedError

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

MOST = 65535
"""The last id of a sandbox."""


async def user_ids(sandbox: AsyncSandbox, user: str | int | None) -> tuple[int, int] | None:
    """Return user and group id of a name or id, optionally `user:group`; None: there is none.

    Args:
        user: None: whoever runs commands by default, who is asked by running one.
    """
    if user is None:
        return await _own(sandbox)
    name, _, group = str(user).partition(":")
    try:
        passwd = await sandbox.files.read_text("/etc/passwd", errors="replace")
    except FileError:
        passwd = ""
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) > 3 and name in (fields[0], fields[2]) and _is_id(fields[2]):
            own = group if _is_id(group) else fields[3]
            return (int(fields[2]), int(own)) if _is_id(own) else None
    if _is_id(name):
        return int(name), int(group if _is_id(group) else name)
    return None


async def _own(sandbox: AsyncSandbox) -> tuple[int, int]:
    try:
        told = await sandbox.exec(["sh", "-c", "id -u; id -g"], cwd="/", deadline_s=30.0)
    except NotExecutedError:
        return 0, 0
    words = told.text.split()
    if len(words) == 2 and all(map(_is_id, words)):
        return int(words[0]), int(words[1])
    return 0, 0


def _is_id(text: str) -> bool:
    """Whether a sandbox has such an id: the text may be an agent's."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MOST
