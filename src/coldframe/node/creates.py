"""Sandboxes as they are asked for: within a quota, and made once per operation id."""

from __future__ import annotations

from functools import partial

from coldframe.host.outcome import Outcome
from coldframe.node.assembly import ImageResolver
from coldframe.node.life import Sandbox
from coldframe.node.operations import CreateOperation, Operations
from coldframe.node.presences import Presence
from coldframe.node.quotas import require_room
from coldframe.node.sandboxes import Sandboxes
from coldframe.protocol.ids import check_operation_id
from coldframe.protocol.models import Quota, SandboxInfo, SandboxSpec
from coldframe.protocol.models.sandboxes import OWNER_LABEL


class Creates:
    """All creates of a node. See `Node.create_sandbox`."""

    def __init__(self, images: ImageResolver, sandboxes: Sandboxes, operations: Operations) -> None:
        self._images, self._sandboxes, self._operations = images, sandboxes, operations

    async def undone_with_its_caller(
        self, spec: SandboxSpec, quota: Quota | None, presence: Presence | None
    ) -> SandboxInfo:
        """Make a sandbox; nobody could ask for it again, so a cancelled wait undoes it."""
        sandbox = self._begin(spec, quota, presence, None)
        info = await self._sandboxes.made_or_undone(sandbox)
        self._sandboxes.claim(sandbox)
        return info

    async def once(
        self, operation_id: str, spec: SandboxSpec, quota: Quota | None, presence: Presence | None
    ) -> SandboxInfo:
        """Make a sandbox, or give the answer of the create that had this id."""
        known = self._operations.find_create(check_operation_id(operation_id), spec)
        if known is None:
            sandbox = self._begin(spec, quota, presence, operation_id)
            assert sandbox.creating is not None
            known = CreateOperation(operation_id, spec, sandbox.creating)
            self._operations.add(known)
            sandbox.creating.then(partial(self._on_end, known))
        return await known.ended

    def _on_end(self, operation: CreateOperation, ended: Outcome[SandboxInfo]) -> None:
        operation.ended = ended.settled()
        self._operations.settle(operation, ended)

    def _begin(
        self,
        spec: SandboxSpec,
        quota: Quota | None,
        presence: Presence | None,
        operation_id: str | None,
    ) -> Sandbox:
        image = self._images.resolve(spec.image)
        if quota is not None and quota != Quota():
            owner = spec.labels.get(OWNER_LABEL, "")
            of_owner = self._sandboxes.register.live({OWNER_LABEL: owner})
            require_room(quota, owner, spec, (one.spec for one in of_owner))
        return self._sandboxes.begin(spec, image, operation_id=operation_id, presence=presence)
