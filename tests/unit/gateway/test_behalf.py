"""For whom a gateway says that it asks: only who may do everything is believed."""

from __future__ import annotations

import pytest

from coldframe.gateway.behalf import heard, told
from coldframe.gateway.identity import Identity, Scope
from coldframe.protocol.errors import InvalidRequestError, NotPermittedError
from coldframe.protocol.models import Quota

ADMIN = frozenset({Scope.ADMIN})
HERS = Identity("amber", frozenset({Scope.READ, Scope.CREATE}), "k1")
GATEWAY = Identity(None, ADMIN, "gateway")


def test_caller_is_heard_as_it_was_told() -> None:
    """Owner, scopes, name and quota: the node must not know less than the gateway."""
    quota = Quota(sandboxes=3)
    expected = Identity("amber", HERS.scopes, "k1", quota, relayed=True)
    assert heard(told(HERS, quota), GATEWAY) == expected


@pytest.mark.parametrize(
    "sender",
    [
        HERS,
        Identity("amber", ADMIN, "k2"),
        Identity(None, frozenset({Scope.CREATE}), "k3"),
    ],
)
def test_who_is_no_administrator_speaks_for_nobody(sender: Identity) -> None:
    """Else any key would be every key."""
    with pytest.raises(NotPermittedError, match="on behalf of others"):
        heard(told(HERS, None), sender)


def test_caller_without_owner_who_is_no_administrator_is_refused() -> None:
    """Without an owner it would see everybody's sandboxes."""
    with pytest.raises(InvalidRequestError, match="no owner"):
        heard(told(Identity(None, HERS.scopes, "k1"), None), GATEWAY)
