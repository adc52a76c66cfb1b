"""Who asks, as one gateway tells it to the next: a header that only administrators may send.

A gateway that stands before another service has found out who asks. It passes the request on under
its own name and says in `Coldframe-On-Behalf` for whom, with what scopes and within what quota.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coldframe.gateway.identity import Identity, Scope
from coldframe.protocol.errors import InvalidRequestError, NotPermittedError
from coldframe.protocol.models import Quota

HEADER = b"coldframe-on-behalf"


class _Behalf(BaseModel):
    model_config = ConfigDict(extra="forbid")

    owner: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")] | None
    scopes: frozenset[Scope]
    name: Annotated[str, Field(max_length=64, pattern=r"^[ -~]*$")]
    quota: Quota | None = None


def told(identity: Identity, quota: Quota | None) -> str:
    """Return what the header says for a caller; `quota`: see `Tenant.quota`."""
    behalf = _Behalf(owner=identity.owner, scopes=identity.scopes, name=identity.name, quota=quota)
    return behalf.model_dump_json()


def heard(value: str, sender: Identity) -> Identity:
    """Return for whom a request is made that carries the header.

    Raises:
        NotPermittedError: the sender may not speak for others.
        InvalidRequestError: it is not what `told` returns.
    """
    if sender.owner is not None or Scope.ADMIN not in sender.scopes:
        raise NotPermittedError(
            f"key {sender.name!r} may not make requests on behalf of others: a gateway needs the "
            "socket of its node, or a key with the scope 'admin'"
        )
    try:
        said = _Behalf.model_validate_json(value)
    except ValidationError as error:
        raise InvalidRequestError("coldframe-on-behalf: not as a gateway writes it") from error
    if said.owner is None and Scope.ADMIN not in said.scopes:
        raise InvalidRequestError("coldframe-on-behalf: who has no owner is an administrator")
    return Identity(said.owner, said.scopes, said.name, said.quota, relayed=True)
