"""Which sandboxes there are and were: found by id or name, each end counted once, each move told.

What the kernel may rightly hold is what is written here, so that the ledger can be compared.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import overload

from coldframe.images.base import Image, ImageConfig
from coldframe.node.events import Events
from coldframe.node.legacy import Legacy, read_sandbox
from coldframe.node.life import Sandbox
from coldframe.node.pool import Pool
from coldframe.node.settings import NodeSettings
from coldframe.node.shares import Shares
from coldframe.protocol import wire
from coldframe.protocol.errors import CapacityError, NameInUseError, SandboxNotFoundError
from coldframe.protocol.models import (
    EventKind,
    GuardReport,
    ImageHealthcheck,
    ImageStart,
    Ledger,
    SandboxSpec,
    SandboxState,
    StorageEvent,
)
from coldframe.protocol.network import EgressEvent
from coldframe.protocol.text import excerpt
from coldframe.runtimes.base import Gone, SandboxHandle
from coldframe.runtimes.outliving import Found

_ENDS = ("deleted", "expired", "failed", "lost")
_LARGE_ENVIRONMENT = 64 << 10
"""Smaller ones, of as many as may live, weigh nothing to speak of."""


class Register:
    """The records of a node's sandboxes."""

    def __init__(
        self,
        settings: NodeSettings,
        node_id: str,
        runtime: str,
        counts: MutableMapping[str, int],
        legacy: Legacy,
    ) -> None:
        """Count in `counts`: created, deleted, expired, failed, lost. `runtime` is a name."""
        self._node_id, self._runtime = node_id, runtime
        self._counts, self._legacy = counts, legacy
        legacy.find = self.find
        self._live: dict[str, Sandbox] = {}
        self._names: dict[str, Sandbox] = {}
        self._environments = Shares(settings.owner_window_bytes, "environments of sandboxes")
        self._ended: Pool[Sandbox] = Pool(settings.ended_count, settings.ended_bytes)
        self._cleaning: dict[str, Sandbox] = {}
        """Lost or failed sandboxes that the runtime is still giving back."""
        self.in_kernel: Sequence[str] = _Ids(self._live, self._cleaning)
        """Ids of which the kernel may rightly hold something, as they are at each look."""
        self.changes = 0
        """Raised whenever the set of what the kernel may hold changes."""
        self.events = {kind: Events(settings.event_count) for kind in EventKind}
        """The latest of each kind."""

    # --- looking up -------------------------------------------------------------------

    def find(self, id_or_name: str) -> Sandbox:
        """Return a sandbox by its id or the name of a live one.

        Raises:
            SandboxNotFoundError: none is known.
        """
        sandbox = (
            self._live.get(id_or_name) or self._names.get(id_or_name) or self._ended.get(id_or_name)
        )
        if sandbox is None:
            raise SandboxNotFoundError(
                f"no sandbox {excerpt(id_or_name)} on node {self._node_id!r}"
            )
        return sandbox

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._live)

    def live(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        """All that have not ended and carry all these labels, oldest first."""
        live, wanted = self._live.values(), (labels or {}).items()
        return [one for one in live if wanted <= one.spec.labels.items()] if wanted else list(live)

    def known(self) -> Iterator[Sandbox]:
        """All of which there is a record, those that have ended last."""
        return itertools.chain(self._live.values(), self._ended)

    def require_free(self, name: str | None) -> None:
        """Refuse a name that belongs to a live sandbox.

        Raises:
            NameInUseError: it does.
        """
        if name is not None and name in self._names:
            raise NameInUseError(
                f"the name {name!r} belongs to a sandbox that is not deleted yet; take another "
                "name, or delete that one by it"
            )

    # --- counting ---------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """How many were created, and how they ended, as in the ledger."""
        return dict(self._counts)

    def census(self) -> Mapping[tuple[str, SandboxState], int]:
        """How many have not ended, by the image that they were asked for with, and state."""
        return Counter((sandbox.spec.image, sandbox.state) for sandbox in self._live.values())

    def ledger(self, leaks: tuple[str, ...]) -> Ledger:
        """The ledger at this moment."""
        return Ledger(**self._counts, live=len(self._live), leaked=len(leaks), leaks=leaks)

    # --- writing ----------------------------------------------------------------------

    def record(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> Sandbox:
        """Make a record that nobody finds yet."""
        return Sandbox(
            id=sandbox_id,
            node_id=self._node_id,
            runtime=self._runtime,
            spec=spec,
            image_digest=image.digest,
            layer_digests=image.layers,
            image_start=_start(image.config),
            workdir=spec.workdir or image.config.workdir,
            tell=self._tell,
        )

    def open(self, sandbox: Sandbox) -> None:
        """Enter a new sandbox.

        Raises:
            CapacityError: environments of its owner's live ones hold too much.
        """
        self._weigh(sandbox)
        self._counts["created"] += 1
        self.changes += 1
        self._enter(sandbox)

    def finish(self, sandbox: Sandbox, state: SandboxState, reason: str | None = None) -> str:
        """Move a sandbox to a final state; return what it is counted as."""
        sandbox.move(state, reason)
        count = "expired" if sandbox.expired and state is SandboxState.DELETED else state.value
        sandbox.handle = None
        self._counts[count] += 1
        self.changes += 1
        del self._live[sandbox.id]
        if sandbox.held:
            self._environments.give_back(sandbox.owner, sandbox.held)
            sandbox.held = 0
        if sandbox.spec.name is not None and self._names.get(sandbox.spec.name) is sandbox:
            del self._names[sandbox.spec.name]
        self._remember(sandbox)
        self._legacy.note(sandbox)
        return count

    def clean(self, sandbox: Sandbox) -> None:
        """It ends, and the kernel may hold something of it until `cleaned`."""
        self._cleaning[sandbox.id] = sandbox

    def cleaned(self, sandbox: Sandbox) -> None:
        """The kernel holds nothing of it any more."""
        self._cleaning.pop(sandbox.id, None)
        self.changes += 1

    def _weigh(self, sandbox: Sandbox) -> None:
        size = sum(len(key) + len(value) for key, value in sandbox.spec.env.items())
        if size > _LARGE_ENVIRONMENT:
            self._environments.take(sandbox.owner, size)
            sandbox.held = size

    def _enter(self, sandbox: Sandbox) -> None:
        self._live[sandbox.id] = sandbox
        if sandbox.spec.name is not None:
            self._names[sandbox.spec.name] = sandbox
        self._tell(sandbox)

    def _remember(self, sandbox: Sandbox) -> None:
        self._ended.add(sandbox, len(wire.dump(sandbox.spec)))
        while surplus := self._ended.surplus():
            self._ended.remove(surplus)
            self._legacy.drop_sandbox(surplus)

    def _tell(self, sandbox: Sandbox) -> None:
        self.events[EventKind.STATE].add(sandbox)

    def tell_egress(self, sandbox: Sandbox, event: EgressEvent) -> None:
        """Something was decided about what a sandbox asked of the network."""
        self.events[EventKind.EGRESS].add(sandbox, event)

    def tell_storage(self, sandbox: Sandbox, why_read_only: str) -> None:
        """A sandbox can write no more, or can again."""
        event = StorageEvent(at=time.time(), writable=not why_read_only, reason=why_read_only)
        self.events[EventKind.STORAGE].add(sandbox, event)

    def tell_tampering(self, sandbox: Sandbox, report: GuardReport) -> None:
        """A guard has reported; what an earlier report of it had is not told again."""
        for refusal in report.refused[sandbox.tampering_told :]:
            self.events[EventKind.TAMPER].add(sandbox, refusal)
        sandbox.tampering_told = max(sandbox.tampering_told, len(report.refused))

    # --- from another process ---------------------------------------------------------

    def go_on(self, found: Found) -> list[tuple[Sandbox, SandboxHandle]]:
        """Have the records of sandboxes that another process had opened; return those that live.

        What it had begun and nothing is found of was never made, or was lost with what kept it.
        """
        records = [
            (one, read_sandbox(one, self.record(one.id, one.spec, one.image)))
            for one in found.sandboxes
        ]
        unended = [(one, sandbox) for one, sandbox in records if not sandbox.ended]
        counted = self._counts["created"] - sum(self._counts[name] for name in _ENDS)
        surplus = len(unended) - counted
        for _, sandbox in records:
            if sandbox.ended:
                self._remember(sandbox)
            else:
                with suppress(CapacityError):  # the bound was larger then
                    self._weigh(sandbox)
                self._enter(sandbox)
        for one, sandbox in unended:
            if one.handle is not None:
                continue
            count = self._finish_found(sandbox, one.gone)
            if surplus > 0:  # it had counted the end already, and was killed in that moment
                self._counts[count] -= 1
                surplus -= 1
        if surplus < 0:
            self._counts["failed" if found.complete else "lost"] -= surplus
        return [(sandbox, one.handle) for one, sandbox in unended if one.handle is not None]

    def _finish_found(self, sandbox: Sandbox, gone: Gone | None) -> str:
        """End the record of one that ended while there was no process; return what it counts as."""
        if sandbox.state is SandboxState.PROVISIONING:
            sandbox.move(SandboxState.READY)
        if sandbox.state is SandboxState.TERMINATING:
            return self.finish(sandbox, SandboxState.DELETED)
        return self.finish(sandbox, SandboxState.LOST, None if gone is None else gone.cause)


class _Ids(Sequence[str]):
    """The keys of some mappings, read anew whenever they are looked at."""

    def __init__(self, *sources: Mapping[str, Sandbox]) -> None:
        self._sources = sources

    def _now(self) -> list[str]:
        return [name for source in self._sources for name in source]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._now()[index]

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)


def _start(config: ImageConfig) -> ImageStart:
    check = config.healthcheck
    return ImageStart(
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        healthcheck=None if check is None else ImageHealthcheck(**vars(check)),
    )
