"""What an owner may have of a node at once.

The node counts what lives at the moment of each create. So there is nothing to reserve, to give
back or to lose, whichever gateway asks: docs/adr/0055-several-gateways-over-one-node.md
"""

from __future__ import annotations

from collections.abc import Iterable

from coldframe.protocol.errors import InvalidRequestError, QuotaError
from coldframe.protocol.models import Quota, SandboxSpec
from coldframe.protocol.resources import Amounts

OWNER_LABEL = "owner"
"""The label that says whose a sandbox is."""

_ROUNDING = 1e-9
"""Ten times a tenth of a processor is one."""


def in_use(live: Iterable[SandboxSpec]) -> Amounts:
    """Return what sandboxes are limited to, together; a disk without a limit counts nothing."""
    specs = list(live)
    return Amounts(
        sandboxes=len(specs),
        cpu=sum(one.cpu for one in specs),
        memory_bytes=sum(one.memory_bytes for one in specs),
        disk_bytes=sum(one.disk_bytes or 0 for one in specs),
    )


def require_room(quota: Quota, owner: str, spec: SandboxSpec, live: Iterable[SandboxSpec]) -> None:
    """Refuse a sandbox that does not fit beside the owner's live ones.

    Raises:
        QuotaError: which amount is used up, and how much was allowed.
        InvalidRequestError: there is a quota of disk, and the sandbox does not say how much.
    """
    if quota.disk_bytes is not None and spec.disk_bytes is None:
        raise InvalidRequestError(f"owner {owner!r} has a quota of disk: say disk_bytes")
    for name, amount in in_use([*live, spec]):
        allowed = getattr(quota, name)
        if allowed is not None and amount > allowed + _ROUNDING:
            raise QuotaError(
                f"owner {owner!r} may have {name}={allowed:g} at once, and would have "
                f"{amount:g}; delete sandboxes, or try again later"
            )
