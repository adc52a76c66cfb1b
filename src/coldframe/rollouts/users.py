"""Who a user of a sandbox is, by number, read from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, NotExecutedError

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox


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
        if len(fields) > 3 and name in (fields[0], fields[2]) and fields[2].isdecimal():
            return int(fields[2]), int(group if group.isdecimal() else fields[3])
    if name.isdecimal():
        return int(name), int(group if group.isdecimal() else name)
    return None


async def _own(sandbox: AsyncSandbox) -> tuple[int, int]:
    try:
        told = await sandbox.exec(["sh", "-c", "id -u; id -g"], cwd="/", deadline_s=30.0)
    except NotExecutedError:
        return 0, 0
    words = told.text.split()
    if len(words) == 2 and all(word.isdecimal() for word in words):
        return int(words[0]), int(words[1])
    return 0, 0
