"""Who asks, and what they may do."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from enum import StrEnum

from coldframe.protocol.errors import NotPermittedError
from coldframe.protocol.models import Quota


class Scope(StrEnum):
    """What a key is for."""

    READ = "read"
    """Look at one's own sandboxes, their output and files."""
    EXEC = "exec"
    """Run commands, change files, connect to ports."""
    CREATE = "create"
    """Make, renew and delete sandboxes, set their network policy."""
    ADMIN = "admin"
    """Everything, of every owner."""


@dataclass(frozen=True)
class Identity:
    """A caller who has shown who it is."""

    owner: str | None
    """Whose sandboxes it sees; None: everybody's."""
    scopes: frozenset[Scope]
    name: str
    """For the log: the key's id, or how the caller was known."""
    quota: Quota | None = None
    """What a gateway that relays said the owner may have."""
    keyed: bool = False
    """Whether it has shown a key, whose id is `name`."""
    relayed: bool = False
    """Whether a gateway tells who this is."""

    @property
    def tag(self) -> str:
        """What sets the owner's operation ids and names apart from other owners'."""
        return "" if self.owner is None else hashlib.sha256(self.owner.encode()).hexdigest()[:10]

    def require(self, scope: Scope) -> None:
        """Refuse what the caller may not do.

        Raises:
            NotPermittedError: the key lacks the scope.
        """
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            scopes = {scope} if scope is Scope.ADMIN else {scope, *self.scopes}
            options = "".join(f" --scope {one}" for one in sorted(scopes))
            owner = shlex.quote(self.owner or "OWNER")
            raise NotPermittedError(
                f"key {self.name!r} lacks the scope {scope.value!r}; "
                f"make one that has it: coldframe key create --owner {owner}{options}"
            )


def local(name: str) -> Identity:
    """Whoever may do everything: root, or the node's own user, on this machine."""
    return Identity(None, frozenset({Scope.ADMIN}), name)
