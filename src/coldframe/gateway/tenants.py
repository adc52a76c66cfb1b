"""The node as one caller sees it: its own sandboxes, operations and names, and nobody else's.

For a caller with an owner, operation ids and names are the node's with the owner's tag before
them, so that two owners never meet: neither can guess, take or block what the other uses. What
belongs to another owner is not found, exactly as what never was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coldframe.gateway.identity import Identity, Scope
from coldframe.node.node import Node
from coldframe.node.presences import Presence
from coldframe.node.quotas import in_use
from coldframe.protocol.errors import InvalidRequestError, SandboxNotFoundError
from coldframe.protocol.ids import check_operation_id, new_operation_id
from coldframe.protocol.models import (
    EventKind,
    EventPage,
    ExecInfo,
    ExecRequest,
    ExecResult,
    OutputChunk,
    ProcessInfo,
    Quota,
    SandboxInfo,
    SandboxSpec,
    SessionInfo,
    SessionResult,
    Stream,
)
from coldframe.protocol.models.sandboxes import OWNER_LABEL
from coldframe.protocol.resources import ResourceReport
from coldframe.protocol.text import excerpt

_LONGEST_NAME = 63


class Quotas(Protocol):
    """Says how much an owner may have."""

    async def quota(self, owner: str) -> Quota: ...


class Tenant:
    """A node for one caller. Raises what `Node` does."""

    def __init__(self, node: Node, identity: Identity, quotas: Quotas) -> None:
        self.node, self.identity = node, identity
        self._quotas = quotas
        self._tag = identity.tag and f"{identity.tag}."

    # --- names ------------------------------------------------------------------------

    def operation(self, operation_id: str | None) -> str:
        """Return the node's id for a caller's; one of our own for none."""
        if operation_id is None:
            return self._tag + new_operation_id()
        check_operation_id(operation_id)
        return check_operation_id(self._tag + operation_id) if self._tag else operation_id

    def untagged(self, name: str) -> str:
        """Return the caller's own word for an id or name of the node's."""
        return name.removeprefix(self._tag) if self._tag else name

    def sandbox(self, id_or_name: str) -> str:
        """Return the id of a sandbox that the caller may see.

        Raises:
            SandboxNotFoundError: there is none of that id or name, or it is another owner's.
        """
        if self._tag == "":
            return id_or_name
        for known in (id_or_name, self._tag + id_or_name):
            spec = self.node.spec_of(known)
            if spec is not None and spec.labels.get(OWNER_LABEL) == self.identity.owner:
                return known
        raise SandboxNotFoundError(f"no sandbox {excerpt(id_or_name)} on this node")

    # --- sandboxes --------------------------------------------------------------------

    async def create(
        self, spec: SandboxSpec, operation_id: str | None, presence: Presence | None = None
    ) -> SandboxInfo:
        """Make a sandbox of the caller's within its quota."""
        inner = None if operation_id is None else self.operation(operation_id)
        info = await self.node.create_sandbox(
            self._inward(spec),
            operation_id=inner,
            quota=await self.quota(),
            presence=presence,
        )
        return self.outward(info)

    async def quota(self) -> Quota | None:
        """Return what the caller's owner may have at once; None: it has no owner."""
        owner = self.identity.owner
        if owner is None:
            return None
        if not self.identity.relayed:
            return await self._quotas.quota(owner)
        if self.identity.quota is None:
            raise InvalidRequestError("the gateway did not say the quota of who asks")
        return self.identity.quota

    def _inward(self, spec: SandboxSpec) -> SandboxSpec:
        owner = self.identity.owner
        if owner is None:
            return spec
        name = None if spec.name is None else self._tag + spec.name
        if name is not None and len(name) > _LONGEST_NAME:
            longest = _LONGEST_NAME - len(self._tag)
            raise InvalidRequestError(f"name: at most {longest} characters on a shared node")
        labels = {**spec.labels, OWNER_LABEL: owner}
        return spec.model_copy(update={"name": name, "labels": labels})

    def outward(self, info: SandboxInfo) -> SandboxInfo:
        """Return what the caller may know of a sandbox."""
        if self._tag == "" or info.spec.name is None:
            return info
        spec = info.spec.model_copy(update={"name": self.untagged(info.spec.name)})
        return info.model_copy(update={"spec": spec})

    async def get(self, id_or_name: str) -> SandboxInfo:
        """See `Node.get`."""
        return self.outward(await self.node.get(self.sandbox(id_or_name)))

    async def list(
        self,
        labels: Mapping[str, str],
        after: tuple[float, str] | None = None,
        limit: int | None = None,
    ) -> tuple[SandboxInfo, ...]:
        """See `Node.list`; of the caller's own only."""
        owner = self.identity.owner
        wanted = labels if owner is None else {**labels, OWNER_LABEL: owner}
        if owner is not None and labels.get(OWNER_LABEL, owner) != owner:
            return ()
        found = await self.node.list(wanted, after=after, limit=limit)
        return tuple(self.outward(info) for info in found)

    async def resources(self) -> ResourceReport:
        """Return what the caller has; with the scope `admin` also what the node has."""
        owner = self.identity.owner
        return ResourceReport(
            in_use=in_use(self.node.specs({} if owner is None else {OWNER_LABEL: owner})),
            quota=await self.quota(),
            node=await self.node.resources() if Scope.ADMIN in self.identity.scopes else None,
        )

    async def events(
        self, kind: EventKind, cursor: str | None, limit: int, wait: bool
    ) -> EventPage:
        """See `Node.events`; of the caller's own only."""
        return await self.node.events(cursor, limit, wait, owner=self.identity.owner, kind=kind)

    # --- commands ---------------------------------------------------------------------

    def request(self, request: ExecRequest) -> ExecRequest:
        """Return a request with the node's id for its operation."""
        if request.operation_id is not None and self._tag == "":
            return request
        inner = self.operation(request.operation_id)
        return request.model_copy(update={"operation_id": inner})

    def result(self, result: ExecResult) -> ExecResult:
        """Return a result with the caller's own ids."""
        if self._tag == "":
            return result
        asked = result.request.operation_id
        request = result.request.model_copy(update={"operation_id": asked and self.untagged(asked)})
        return result.model_copy(
            update={
                "operation_id": self.untagged(result.operation_id),
                "request": request,
                "leftovers": self.processes(result.leftovers),
            }
        )

    def commands(self, found: tuple[ExecInfo, ...]) -> tuple[ExecInfo, ...]:
        """Return commands with the caller's own ids."""
        return tuple(
            one.model_copy(update={"operation_id": self.untagged(one.operation_id)})
            for one in found
        )

    def session(self, info: SessionInfo) -> SessionInfo:
        """Return a session with the caller's own ids."""
        return info.model_copy(
            update={
                "id": self.untagged(info.id),
                "running": info.running and self.untagged(info.running),
                "ended": info.ended and self.result(info.ended),
            }
        )

    def session_result(self, told: SessionResult) -> SessionResult:
        """Return how a command of a session ended with the caller's own ids."""
        ended = told.ended and self.result(told.ended)
        return told.model_copy(update={"result": self.result(told.result), "ended": ended})

    def processes(self, found: tuple[ProcessInfo, ...]) -> tuple[ProcessInfo, ...]:
        """Return processes with the caller's own ids."""
        if self._tag == "":
            return found
        return tuple(
            one.model_copy(
                update={"operation_id": one.operation_id and self.untagged(one.operation_id)}
            )
            for one in found
        )

    async def wait_exec(self, operation_id: str, /) -> ExecResult:
        """See `Node.wait_exec`."""
        return self.result(await self.node.wait_exec(self.operation(operation_id)))

    async def read_output(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool, /
    ) -> OutputChunk:
        """See `Node.read_output`."""
        return await self.node.read_output(
            self.operation(operation_id), stream, cursor, max_bytes, wait
        )
