"""Other names of images: what public Dockerfiles call an image, and what the store has instead.

A table in one small file of the store, and what is true without it: the numbers of Debian's
releases, and their slim variants (what `image bootstrap` makes is slim).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from coldframe.images import names
from coldframe.images.locks import locked
from coldframe.protocol.errors import ImageDamagedError, ImageError, ImageNotFoundError
from coldframe.protocol.text import excerpt

_DEBIAN = {"11": "bullseye", "12": "bookworm", "13": "trixie"}
BUILT_IN: Mapping[str, str] = {
    f"debian:{one}{slim}": f"debian:{suite}"
    for number, suite in _DEBIAN.items()
    for one in (number, suite)
    for slim in ("", "-slim")
    if f"{one}{slim}" != suite
}


class Aliases:
    """The table of one store, for any number of processes."""

    def __init__(self, root: Path, write: Callable[[Path, Mapping[str, str]], None]) -> None:
        """`write` puts a record on disk whole or not at all."""
        self._file = root / "aliases.json"
        self._lock = root / "aliases.lock"
        self._write = write

    def table(self) -> dict[str, str]:
        """Return what was added, name to target, in order of the names.

        Raises:
            ImageDamagedError: the file is damaged.
        """
        try:
            raw = json.loads(self._file.read_bytes())
            return {str(name): str(raw[name]) for name in sorted(raw)}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as error:
            raise ImageDamagedError(f"{self._file} is damaged ({error}); remove it") from error

    def target(self, name: str) -> str | None:
        """Return what a full name (`name:tag` or `name:tag@sha256:...`) stands for, if anything.

        Raises ImageError.
        """
        return self.table().get(name) or BUILT_IN.get(name)

    def why_none(self, name: str) -> str:
        """Say what a full name is that no image itself has. Raises ImageError."""
        target = self.target(name)
        if target is None:
            return f"no image {excerpt(name)} in the store; see: coldframe image ls"
        forget = ""
        if name in self.table():
            forget = f"; forget it with: coldframe image alias rm {name}"
        return f"{excerpt(name)} is no image but an alias of {excerpt(target)}{forget}"

    def add(self, name: str, target: str) -> tuple[str, str]:
        """Let a name stand for an image (a name or digest); return both in full.

        Raises:
            InvalidRequestError: either is no name.
            ImageError: they are the same.
            ImageDamagedError: the table is damaged.
            StorageFullError: no space is left.
        """
        full = _full(name)
        meant = names.digest_of(target) or names.normalise(target)
        if meant == full:
            raise ImageError(f"{excerpt(name)} cannot stand for itself")
        self._change({full: meant})
        return full, meant

    def remove(self, name: str) -> str:
        """Forget a name that was added; return it in full.

        Raises:
            ImageNotFoundError: it is not in the table.
            InvalidRequestError, ImageError, StorageFullError: as `add`.
        """
        full = _full(name)
        if full not in self.table():
            raise ImageNotFoundError(f"{full!r} is no alias; see: coldframe image alias ls")
        self._change({full: None})
        return full

    def _change(self, changes: Mapping[str, str | None]) -> None:
        with locked(self._lock):
            table = {**self.table(), **changes}
            self._write(
                self._file, {name: target for name, target in table.items() if target is not None}
            )


def _full(name: str) -> str:
    plain, digest = names.reference(name)
    return f"{plain}@sha256:{digest}" if digest else plain


def how_to_get(name: str, digest: str | None, known: Sequence[str]) -> str:
    """Say that there is no such image, which of those that are known is meant, or what makes it."""
    full = f"{name}@sha256:{digest}" if digest else name
    repository, _, tag = name.partition(":")
    make = f"coldframe image import {name} ROOTFS.tar, or coldframe image build -t {name} DIRECTORY"
    if repository == "busybox":
        make = "coldframe image bootstrap busybox"
    elif repository == "debian":
        suite = "debian:SUITE" if tag == "latest" else BUILT_IN.get(name, name)
        make = f"coldframe image bootstrap {suite}"
    close = _nearest(name, known)
    meant = f": did you mean {close!r}? Else" if close else ";"
    return (
        f"no image {full!r} in the store{meant} make it with: {make}; "
        f"or let another stand for it: coldframe image alias {full} TARGET"
    )


def _nearest(name: str, known: Sequence[str]) -> str | None:
    repository, _, tag = name.partition(":")
    if tag == "latest":  # most likely none was written
        siblings = [one for one in known if one.partition(":")[0] == repository]
        if siblings:
            return siblings[0]
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.8)), None)
