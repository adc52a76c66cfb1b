"""What a node is asked about sandboxes: made, found, renewed, ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice

from coldframe.node.life import Sandbox
from coldframe.node.opening import OpenNode
from coldframe.node.presences import Presence, Presences
from coldframe.protocol.errors import SandboxNotFoundError
from coldframe.protocol.models import (
    Quota,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)


class SandboxCalls(OpenNode):
    """See `Node`."""

    async def create_sandbox(
        self,
        spec: SandboxSpec,
        *,
        operation_id: str | None = None,
        quota: Quota | None = None,
        presence: Presence | None = None,
    ) -> SandboxInfo:
        """Make a sandbox; return once it is ready.

        With an operation id the create goes on when the caller is cancelled, and asking again
        gives its answer. Without one nobody could ask, so it is undone. The label `owner` names
        whose turn it takes in the queue, and whose live sandboxes count for `quota`. Which is
        looked at in the moment before a new sandbox is recorded, so that it is exact however many
        ask at once; it refuses no answer that is there already. It ends with the client that
        `presence` names.

        Raises:
            ImageNotFoundError, NameInUseError, CapacityError, QuotaError, InvalidRequestError,
                CapabilityError, StorageFullError: refused; nothing was begun, nor counted.
            CreateError, StorageFullError: it failed and nothing of it is left.
            OperationMismatchError, OperationExpiredError: see `Operations`.
        """
        creates = self._works.creates
        if operation_id is None:
            return await creates.undone_with_its_caller(spec, quota, presence)
        return await creates.once(operation_id, spec, quota, presence)

    async def get(self, id_or_name: str) -> SandboxInfo:
        """Return what is known of a sandbox: by id also when it has ended, by name while live."""
        return self._find(id_or_name).info()

    async def list(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        after: tuple[float, str] | None = None,
        limit: int | None = None,
    ) -> tuple[SandboxInfo, ...]:
        """Return the sandboxes that have not ended and carry all these labels, oldest first.

        Of those that were created after a moment and id, at most `limit`.
        """
        found: Iterable[Sandbox] = self._works.register.live(labels)
        if after is not None:
            found = (one for one in found if (one.created_at, one.id) > after)
        return tuple(one.info() for one in islice(found, limit))

    def specs(self, labels: Mapping[str, str]) -> Iterator[SandboxSpec]:
        """Yield what those were asked for that have not ended and carry all these labels."""
        return (one.spec for one in self._works.register.live(labels))

    def spec_of(self, id_or_name: str) -> SandboxSpec | None:
        """Return what was asked for under an id or name; None: it is not known."""
        try:
            return self._find(id_or_name).spec
        except SandboxNotFoundError:
            return None

    async def wait_for_state(
        self, id_or_name: str, states: Collection[SandboxState], timeout_s: float
    ) -> SandboxInfo:
        """Return once it is in one of these states, has ended, or after `timeout_s`."""
        sandbox = self._find(id_or_name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while sandbox.state not in states and not sandbox.ended:
                    await sandbox.moved()
        return sandbox.info()

    async def delete(self, id_or_name: str, *, expected_version: int | None = None) -> SandboxInfo:
        """End a sandbox; return when nothing of it is left. One that has ended already is fine."""
        sandbox = self._find(id_or_name)
        if not sandbox.ended:
            sandbox.require_version(expected_version)
        await self._works.sandboxes.end(sandbox, expired=False)
        return sandbox.info()

    async def renew(
        self, id_or_name: str, ttl_s: float | None, *, expected_version: int | None = None
    ) -> SandboxInfo:
        """Let the lease end `ttl_s` from now; None: never.

        Raises:
            InvalidRequestError: `ttl_s` is not a positive number of seconds.
        """
        sandbox = self._find(id_or_name)
        sandbox.require_ready(expected_version)
        self._works.sandboxes.leases.renew(sandbox, ttl_s)
        return sandbox.info()

    def presences(self) -> Presences:
        """Return the clients that are there, and what ends with each."""
        return self._works.sandboxes.presences

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[SandboxInfo]:
        """Make a sandbox for a block and delete it at the end."""
        info = await self.create_sandbox(spec)
        try:
            yield info
        finally:
            await self.delete(info.id)
