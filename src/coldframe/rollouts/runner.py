"""Who runs what is not the agent's: whoever it was before the agent acted.

Whatever the sandbox's lists say by now: an agent that is root may change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldframe.protocol.errors import UserNotFoundError
from coldframe.rollouts.integrity import USER_CHANGED, Tampering
from coldframe.rollouts.places import ROOT
from coldframe.rollouts.users import Account, accounts_of, user_ids

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

_ROOT = frozenset((0, "0", "root"))


@dataclass(frozen=True)
class Runner:
    """The user of test.sh, or of a step's setup.sh, in one sandbox."""

    sandbox: AsyncSandbox
    user: str | int | None
    """None: the sandbox's own."""
    before: Account | None
    """Who that was before the agent acted; None: as the sandbox has it now."""
    tampering: Tampering

    @property
    def is_root(self) -> bool:
        """Whether root is asked for by a name that nobody can give to another."""
        return self.user in _ROOT

    async def owner(self) -> tuple[int, int]:
        """Return whom its files belong to.

        Raises:
            UserNotFoundError: there is no such user.
        """
        if self.is_root:
            return ROOT
        if self.before is not None:
            return self.before.ids
        ids = await user_ids(self.sandbox, self.user)
        if ids is None:
            raise UserNotFoundError(f"user {self.user!r} is not in the sandbox's /etc/passwd")
        return ids

    async def now(self) -> tuple[str | int | None, dict[str, str]]:
        """Return whom to run it as, and what else to say in its environment.

        By name where the name means what it did, since that has the user's other groups.
        """
        user, before = self.user, self.before
        if user is None or before is None:
            return user, {}
        now = (await accounts_of(self.sandbox)).get(user)
        if now == before:
            return user, {}
        if USER_CHANGED not in {one.what for one in self.tampering.events}:
            self.tampering.found(USER_CHANGED, "/etc/passwd", str(before), str(now), voided=False)
        home = {"HOME": before.home} | ({} if before.name is None else {"USER": before.name})
        return f"{before.uid}:{before.gid}", home
