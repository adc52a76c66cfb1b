"""Look users up in the sandbox's own /etc/passwd and /etc/group: no NSS, nothing of the host's.

The files are hostile: bounded, parsed leniently, read through the root descriptor, and read
again only when they have changed. Files of the image itself are read once for all its sandboxes.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from coldframe.host.descriptors import needing_room
from coldframe.host.roottree import IDS_PER_SANDBOX, RootTree, closing, reopen, require_regular
from coldframe.protocol.errors import FileError, UserNotFoundError
from coldframe.protocol.text import excerpt

T = TypeVar("T")

_ETC = b"/etc"
_PLAINLY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_LIMIT = 1 << 20
_GROUPS_LIMIT = 1024
_SHARED_FILES = 64
_SHARED_LIMIT = 64 << 10
"""Sandboxes of one image share what was parsed, unless somebody made it large."""
Rows = tuple[T, ...]
_Key = tuple[int, int, int, int, int]
_ImageKey = tuple[str, bytes, int, int, int, int]
_SURELY_BEFORE_S = 1.0
"""File systems note times by a coarser clock."""

_image_rows: dict[_ImageKey | None, Rows[Any]] = {}
"""Rows of files that lie in an image, the oldest first. The device is another in each sandbox."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom a command runs as, in the sandbox's ids."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Supplementary groups."""
    name: str | None = None
    home: str = "/"


@dataclass(frozen=True, slots=True)
class _Account:
    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    gid: int
    members: frozenset[str]


class Users:
    """The users of one sandbox, as its files say at the time of each question."""

    def __init__(self, image: str = "") -> None:
        """`image` is the digest of what the sandbox, which has just been made, is made of."""
        self._passwd = _Cached(b"passwd", _parse_accounts, image)
        self._group = _Cached(b"group", _parse_groups, image)
        self._known: dict[str | int, User] = {}

    def resolve(self, tree: RootTree, wanted: str | int) -> User:
        """Return the user that `name`, `id`, `user:group` or the like stands for.

        A number needs no entry, and no file that can be read: one that cannot has no entries
        for it. Raises UserNotFoundError.
        """
        before = self._passwd.rows, self._group.rows
        changed = False
        if not self._recognized(tree):
            changed = self._passwd.look(tree) | self._group.look(tree)
        if changed or self._passwd.rows is not before[0] or self._group.rows is not before[1]:
            self._known.clear()
        known = self._known.get(wanted)
        if known is None:
            known = self._known[wanted] = _resolve(self._passwd, self._group, wanted)
        return known

    def _recognized(self, tree: RootTree) -> bool:
        """Whether both are plainly files that were read: a fifth of the price of reading them.

        In a directory, itself and not by a link: one name, so that nothing leads astray.
        """
        try:
            etc = os.open(b"etc", _PLAINLY, dir_fd=tree.root)
        except OSError:
            return False
        try:
            return self._passwd.recognize(etc) and self._group.recognize(etc)
        except OSError:  # one of them is absent
            return False
        finally:
            os.close(etc)


def _resolve(passwd: _Cached[_Account], group: _Cached[_Group], wanted: str | int) -> User:
    user_text, _, group_text = str(wanted).partition(":")
    account = _find_account(passwd, user_text)
    if group_text:
        # As usual elsewhere: a group that is named takes the place of all others.
        return User(
            account.uid,
            _find_group(group, group_text),
            (),
            account.name or None,
            account.home,
        )
    if _id(user_text) is None:
        group.require()  # else a name would silently lose its groups
    name = account.name
    member_of = [row.gid for row in group.rows if name and name in row.members]
    return User(
        account.uid,
        account.gid,
        tuple(dict.fromkeys(member_of))[:_GROUPS_LIMIT],
        account.name or None,
        account.home,
    )


def _find_account(passwd: _Cached[_Account], text: str) -> _Account:
    for account in passwd.rows:
        if account.name == text:
            return account
    number = _id(text)
    if number is None:
        passwd.require()
        raise UserNotFoundError(f"no user {excerpt(text)} in the sandbox's /etc/passwd")
    for account in passwd.rows:
        if account.uid == number:
            return account
    return _Account("", number, 0, "/")


def _find_group(group: _Cached[_Group], text: str) -> int:
    for row in group.rows:
        if row.name == text:
            return row.gid
    number = _id(text)
    if number is None:
        group.require()
        raise UserNotFoundError(f"no group {excerpt(text)} in the sandbox's /etc/group")
    return number


def _id(text: str) -> int | None:
    """Return an id of the sandbox, or None if the text is none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        return None
    number = int(text)
    return number if number < IDS_PER_SANDBOX else None


class _Cached(Generic[T]):
    """One file of /etc, parsed; looked at on every question, read only when it is another one."""

    def __init__(self, name: bytes, parse: Callable[[str], Rows[T]], image: str) -> None:
        self._name, self._path, self._parse = name, _ETC + b"/" + name, parse
        self._image, self._made_at = image, time.time()
        self._key: _Key | None = None
        self._problem: str | None = None
        self.rows: Rows[T] = ()
        """An absent file has none, and so has one that cannot be read."""

    def recognize(self, etc: int) -> bool:
        """Whether what lies in a directory, itself and not by a link, is a file with known rows.

        It is the one that was read, or the image's own as another sandbox has read it.
        """
        status = os.stat(self._name, dir_fd=etc, follow_symlinks=False)
        key = _key(status)
        if key == self._key:
            return True
        rows = _image_rows.get(self._image_key(status))
        if rows is None:
            return False
        self._replace(key, rows, None)
        return True

    def _image_key(self, status: os.stat_result) -> _ImageKey | None:
        """What makes a file of the image one; None: it may be one of the sandbox's own.

        Whatever is written in a sandbox changes later than the sandbox was made.
        """
        if not self._image or status.st_ctime > self._made_at - _SURELY_BEFORE_S:
            return None
        return self._image, self._name, *_key(status)[1:]

    def look(self, tree: RootTree) -> bool:
        """Read the file if it is another one than before; return whether the rows may differ."""
        try:
            with needing_room("the sandbox's users cannot be read"):
                handle = tree.open(self._path)
        except OSError:  # absent, or where no file can be
            return self._replace(None, (), None)
        with closing(handle):
            status = os.fstat(handle)
            key = _key(status)
            if key == self._key:
                return False
            try:
                text = self._content(handle, status)
            except (OSError, FileError) as error:
                return self._replace(None, (), f"the sandbox's users cannot be read: {error}")
            shared = len(text) < _SHARED_LIMIT
            rows = (self._parse if shared else inspect.unwrap(self._parse))(text)
            image_key = self._image_key(status)
            if shared and image_key is not None:
                if len(_image_rows) >= _SHARED_FILES:
                    del _image_rows[next(iter(_image_rows))]
                _image_rows[image_key] = rows
            return self._replace(key, rows, None)

    def require(self) -> None:
        """Raise UserNotFoundError if the file is there and cannot be read."""
        if self._problem is not None:
            raise UserNotFoundError(self._problem)

    def _replace(self, key: _Key | None, rows: Rows[T], problem: str | None) -> bool:
        changed = self._key is not None or key is not None or problem != self._problem
        self._key, self.rows, self._problem = key, rows, problem
        return changed

    def _content(self, handle: int, status: os.stat_result) -> str:
        require_regular(status, self._path)
        with needing_room("the sandbox's users cannot be read"):
            fd = reopen(handle, os.O_RDONLY)
        with closing(fd):
            data = os.pread(fd, min(status.st_size, _FILE_LIMIT) + 1, 0)
        if len(data) > _FILE_LIMIT:
            shown = os.fsdecode(self._path)
            raise FileError(f"{shown!r} is larger than {_FILE_LIMIT} bytes")
        return data.decode("utf-8", "surrogateescape")


def _key(status: os.stat_result) -> _Key:
    """What is another when the file or its content is another."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


@lru_cache(maxsize=_SHARED_FILES)
def _parse_accounts(text: str) -> tuple[_Account, ...]:
    accounts = []
    for line in text.split("\n"):
        parts = line.split(":")
        if len(parts) < 6:
            continue
        uid, gid = _id(parts[2]), _id(parts[3])
        if parts[0] and uid is not None and gid is not None and "\0" not in line:
            accounts.append(_Account(parts[0], uid, gid, parts[5] or "/"))
    return tuple(accounts)


@lru_cache(maxsize=_SHARED_FILES)
def _parse_groups(text: str) -> tuple[_Group, ...]:
    groups = []
    for line in text.split("\n"):
        parts = line.split(":")
        gid = _id(parts[2]) if len(parts) >= 4 else None
        if gid is not None and parts[0]:
            groups.append(_Group(parts[0], gid, frozenset(filter(None, parts[3].split(",")))))
    return tuple(groups)
