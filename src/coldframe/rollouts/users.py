"""Who a user of a sandbox is, by number, read from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, NotExecutedError

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

MOST = 65535
"""The last id of a sandbox."""


_FILE_BYTES = 1 << 20
"""Of the sandbox's lists; larger ones are not read for commands either."""


@dataclass(frozen=True)
class Account:
    """Who a user of a sandbox is."""

    uid: int
    gid: int
    name: str | None = None
    home: str = "/"
    groups: frozenset[int] = frozenset()
    """In which the user is named."""

    @property
    def ids(self) -> tuple[int, int]:
        """User and group id."""
        return self.uid, self.gid


@dataclass(frozen=True)
class Accounts:
    """A sandbox's own lists, as they were when they were read."""

    users: tuple[tuple[str, ...], ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()

    def get(self, user: str | int | None) -> Account | None:
        """Return who a name or id, optionally `user:group`, is; None: nobody, or not known."""
        if user is None:
            return None
        name, _, group = str(user).partition(":")
        for fields in self.users:
            if name in (fields[0], fields[2]) and _is_id(fields[2]):
                own = group if _is_id(group) else fields[3]
                if not _is_id(own):
                    return None
                named = (
                    int(row[2])
                    for row in self.groups
                    if _is_id(row[2]) and fields[0] in row[3].split(",")
                )
                ids = int(fields[2]), int(own)
                return Account(*ids, fields[0], fields[5], frozenset(named))
        if _is_id(name):
            return Account(int(name), int(group) if _is_id(group) else 0)
        return None


async def accounts_of(sandbox: AsyncSandbox) -> Accounts:
    """Read who is who in a sandbox."""
    return Accounts(await _rows(sandbox, "/etc/passwd", 6), await _rows(sandbox, "/etc/group", 4))


async def user_ids(sandbox: AsyncSandbox, user: str | int | None) -> tuple[int, int] | None:
    """Return user and group id of a name or id, optionally `user:group`; None: there is none.

    Args:
        user: None: whoever runs commands by default, who is asked by running one.
    """
    if user is None:
        return await _own(sandbox)
    account = (await accounts_of(sandbox)).get(user)
    return None if account is None else account.ids


async def _rows(sandbox: AsyncSandbox, path: str, least: int) -> tuple[tuple[str, ...], ...]:
    """Return the rows of a list that have so many fields; none, if it cannot be read."""
    try:
        content = await sandbox.files.read(path, length=_FILE_BYTES + 1)
    except FileError:
        return ()
    if len(content) > _FILE_BYTES:
        return ()
    rows = (tuple(line.split(":")) for line in content.decode("utf-8", "replace").split("\n"))
    return tuple(row for row in rows if len(row) >= least)


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
