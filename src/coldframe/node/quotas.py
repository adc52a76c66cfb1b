"""What an owner may have of a node at once.

The node counts what lives at the moment of each create. So there is nothing to reserve, to give
back or to lose, whichever gateway asks: docs/adr/0055-several-gateways-over-one-node.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from coldframe.protocol.errors import InvalidRequestError, QuotaError, UnsatisfiableError
from coldframe.protocol.models import Quota, SandboxSpec
from coldframe.protocol.resources import Amounts

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
        UnsatisfiableError: it alone is more than is allowed.
        QuotaError: which amount is used up, and how much was allowed.
        InvalidRequestError: there is a quota of disk, and the sandbox does not say how much.
    """
    if quota.disk_bytes is not None and spec.disk_bytes is None:
        raise InvalidRequestError(f"owner {owner!r} has a quota of disk: say disk_bytes")
    allowed = {name: most for name, most in quota if most is not None}
    for name, amount in _over(in_use([spec]), allowed):
        raise UnsatisfiableError(
            f"owner {owner!r} may have {name}={allowed[name]:.12g} at once, and this sandbox "
            f"alone asks for {amount:.12g}; ask for less, or have the quota raised"
        )
    for name, amount in _over(in_use([*live, spec]), allowed):
        raise QuotaError(
            f"owner {owner!r} may have {name}={allowed[name]:.12g} at once, and would "
            f"have {amount:.12g}; delete sandboxes, or try again later"
        )


def _over(amounts: Amounts, allowed: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, amount in amounts:
        if name in allowed and amount > allowed[name] + _ROUNDING:
            yield name, amount
