"""A native sandbox's egress: its gateway while it has a policy, its events as long as it lives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import posixpath
import resource
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

from coldframe.host.egress.annex import Annex
from coldframe.host.egress.desk import Room
from coldframe.host.egress.events import EventLog
from coldframe.host.egress.flows import Budget
from coldframe.host.egress.gateway import Gateway
from coldframe.host.egress.listeners import SERVICE
from coldframe.host.egress.namespace import open_network
from coldframe.host.egress.netlink import RouteSocket
from coldframe.host.egress.policy import Engine
from coldframe.host.egress.presets import cached_preset_rules, preset_rules
from coldframe.host.egress.resolver import Resolve, SystemResolver
from coldframe.host.egress.steering import Steering
from coldframe.host.rootfs import RootFiles
from coldframe.host.spawner import Place
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    FileError,
    InvalidRequestError,
    PathNotFoundError,
    SandboxGoneError,
)
from coldframe.protocol.network import (
    EgressDecision,
    EgressEvent,
    EgressEvents,
    EgressKind,
    NetworkPolicy,
    NetworkRule,
)
from coldframe.runtimes.native_trust import Trust

_RESOLV = "/etc/resolv.conf"
_OURS = (
    "# Written by the sandbox's network policy, which decides what may be asked.\n"
    f"nameserver {SERVICE}\n"
).encode()
_MOST_RESOLV = 1 << 16
_SPARES, _SPARE_AFTER_S = 8, 0.02
_DESCRIPTORS, _KEPT_DESCRIPTORS, _LEAST_CONNECTIONS = 1 << 17, 3000, 64


class NodeNetwork:
    """What all sandboxes of a node share: its way to resolve names, and its own addresses."""

    def __init__(self, resolve: Resolve | None = None) -> None:
        """`resolve` takes the place of the host's own way."""
        self._system = SystemResolver()
        self.resolve: Resolve = resolve or self._system
        self._routes: RouteSocket | None = None
        self._room: Room | None = None
        self._steering: list[Steering] = []
        """Some that are ready, once there has been egress at all."""
        self._timer: asyncio.TimerHandle | None = None
        self._loading: asyncio.Future[None] | None = None
        self._closed = False

    def take_steering(self) -> Steering:
        """Return a loaded program, and let others be loaded in an idle moment.

        Raises CapabilityError.
        """
        if self._timer is None and self._loading is None and len(self._steering) <= _SPARES // 2:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_SPARE_AFTER_S, self._begin_loading)
        return self._steering.pop() if self._steering else Gateway.load_steering()

    def _begin_loading(self) -> None:
        self._timer = None
        self._loading = asyncio.ensure_future(asyncio.to_thread(self._load_spares))
        self._loading.add_done_callback(self._loaded)

    def _load_spares(self) -> None:
        """Runs in a thread: the kernel checks a program for as long as half a create's rest."""
        with contextlib.suppress(CapabilityError):  # whoever needs one will be told
            while len(self._steering) < _SPARES and not self._closed:
                self._steering.append(Gateway.load_steering())

    def _loaded(self, loading: asyncio.Future[None]) -> None:
        self._loading = None
        if self._closed:
            self._close_spares()

    def _close_spares(self) -> None:
        while self._steering:
            self._steering.pop().close()

    @property
    def room(self) -> Room:
        """How many connections its sandboxes may have; each costs two descriptors somewhere."""
        if self._room is None:
            limit = _raise_descriptor_limit()
            most = max(_LEAST_CONNECTIONS, (limit - _KEPT_DESCRIPTORS) // 2)
            self._room = Room(Budget(most), Annex(limit))
        return self._room

    def is_own(self, address: IPv4Address | IPv6Address) -> bool:
        """Whether packets to an address stay on this machine."""
        if self._routes is None:
            self._routes = RouteSocket()
        try:
            return self._routes.is_own(address)
        except OSError:  # no way leads there: connecting will say so
            return False

    def close(self) -> None:
        """Give everything back."""
        self._system.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._closed = True
        self._close_spares()
        if self._room is not None:
            self._room.annex.close()
        if self._routes is not None:
            self._routes.close()
            self._routes = None


class NativeEgress:
    """One sandbox's."""

    def __init__(self, sandbox_id: str, node: NodeNetwork) -> None:
        self._sandbox_id, self._node = sandbox_id, node
        self._place: Place
        self._files: RootFiles
        self._trust: Trust
        self._log = EventLog(sandbox_id)
        self._begun: asyncio.Task[Gateway] | None = None
        """Opens for a sandbox that is still being made."""
        self._gateway: Gateway | None = None
        self._before: bytes | None = None
        """What resolv.conf held before the first policy; None: there was none."""
        self._resolv = _RESOLV.encode()
        self._written = False
        self._changing = asyncio.Lock()
        self._ended = False

    def begin(self, place: Place, policy: NetworkPolicy) -> None:
        """Open already, while the rest of the sandbox is made: there is its network, but no root.

        `set_policy` of that policy goes on with it, `withdraw` takes it back.
        """
        rules = cached_preset_rules(policy.presets)
        if rules is not None and not policy.redacted:
            engine = Engine(policy, self._node.is_own, rules)
            self._begun = asyncio.ensure_future(self._open(place, engine))

    async def withdraw(self) -> None:
        """Take back what was begun, if anything was."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with contextlib.suppress(ColdframeError):
                await (await begun).close(sandbox_ends=True)

    @property
    def resolv_before(self) -> str | None:
        """What `go_on` needs to put back one day what was written; None: nothing was."""
        added = self._trust.added
        if not self._written and added is None:
            return None
        before = None if self._before is None else base64.b64encode(self._before).decode()
        return json.dumps(
            {
                "path": os.fsdecode(self._resolv),
                "before": before,
                "written": self._written,
                "trusted": None if added is None else added.decode("ascii"),
            }
        )

    async def go_on(self, policy: NetworkPolicy, resolv_before: str | None) -> None:
        """Put in force again what another process had in force.

        Where that cannot be done nothing but loopback can be reached, and an event says why.
        """
        if resolv_before is not None:
            told = json.loads(resolv_before)
            before = told["before"]
            self._resolv = os.fsencode(told["path"])
            self._before = None if before is None else base64.b64decode(before)
            self._written = told["written"]
            if told["trusted"] is not None:
                with contextlib.suppress(FileError):  # it stays, and is of no use to anybody
                    await self._trust.replace(told["trusted"].encode("ascii"))
        try:
            await self.set_policy(policy)
        except ColdframeError as error:
            self._log.add(EgressKind.POLICY, EgressDecision.FAILED, reason=str(error))

    def settle(self, place: Place, files: RootFiles) -> None:
        """The sandbox is made."""
        self._place, self._files = place, files
        self._trust = Trust(files)

    @property
    def active(self) -> bool:
        """Whether there are listeners of ours in the sandbox."""
        return self._gateway is not None

    def events(self, cursor: int, limit: int) -> EgressEvents:
        """Return events from a cursor on."""
        return self._log.read(cursor, limit)

    def tell(self, told: Callable[[EgressEvent], None]) -> None:
        """See `TellsEgress`."""
        self._log.tell(told)

    async def set_policy(self, policy: NetworkPolicy) -> None:
        """Put a policy in force, for open connections too.

        Raises:
            CapabilityError: the kernel cannot do it, or something inside is in the way.
            InvalidRequestError: it was read from a record, without its secrets.
            SandboxGoneError: the sandbox has ended.
        """
        if policy.redacted:
            raise InvalidRequestError("this policy's secrets were left out when it was recorded")
        rules = cached_preset_rules(policy.presets)
        if rules is None:
            rules = await asyncio.to_thread(preset_rules, policy.presets)
        async with self._changing:
            if self._ended:
                raise SandboxGoneError(f"sandbox {self._sandbox_id!r} has ended")
            if policy.empty:
                await self._remove()
            else:
                await self._apply(policy, rules)
            self._log.add(
                EgressKind.POLICY, EgressDecision.ALLOWED, reason=f"policy {policy.digest}"
            )

    async def _apply(self, policy: NetworkPolicy, presets: tuple[NetworkRule, ...]) -> None:
        if self._gateway is not None:
            await self._trust_for(policy, self._gateway)
            await self._gateway.desk.replace(Engine(policy, self._node.is_own, presets))
            return
        begun, self._begun = self._begun, None
        if begun is not None:
            gateway = await begun
        else:
            gateway = await self._open(self._place, Engine(policy, self._node.is_own, presets))
        try:
            await self._write_resolv()
            await self._trust_for(policy, gateway)
        except BaseException:
            await gateway.close()
            await self._restore_resolv()
            raise
        self._gateway = gateway

    async def _open(self, place: Place, engine: Engine) -> Gateway:
        try:
            network = open_network(place.pid, place.network)
        except ProcessLookupError:
            raise SandboxGoneError(f"sandbox {self._sandbox_id!r} has ended") from None
        gateway = Gateway(network, engine, self._node.resolve, self._log, self._node.room)
        try:
            await gateway.open(self._node.take_steering())
        except BaseException as error:
            await gateway.close()
            if isinstance(error, OSError):
                raise CapabilityError(f"egress cannot be opened in the sandbox: {error}") from error
            raise
        return gateway

    async def _remove(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()
            await self._restore_resolv()
            await self._trust_for(NetworkPolicy(), gateway)

    async def close(self) -> None:
        """End every connection; the sandbox ends too."""
        self._ended = True
        await self.withdraw()
        async with self._changing:
            gateway, self._gateway = self._gateway, None
            if gateway is not None:
                await gateway.close(sandbox_ends=True)

    async def _trust_for(self, policy: NetworkPolicy, gateway: Gateway) -> None:
        """Let the sandbox trust its own authority as long as TLS is ended for it."""
        try:
            if any(one.tls for one in policy.credentials):
                pem = await asyncio.to_thread(lambda: gateway.desk.authority.pem)
                await self._trust.add(pem)
            else:
                await self._trust.remove()
        except FileError as error:
            self._log.add(
                EgressKind.POLICY,
                EgressDecision.FAILED,
                reason=f"the certificate of credentials could not be put in its place: {error}",
            )

    # --- resolv.conf ------------------------------------------------------------------

    async def _exchange_resolv(self) -> bytes | None:
        """Write it; images of whole machines link it to what a service would make."""
        try:
            return await self._files.exchange(self._resolv, _OURS, owner=(0, 0), most=_MOST_RESOLV)
        except FileError:
            target = (await self._files.stat(self._resolv, follow=False)).target
            if target is None:
                raise
            self._resolv = posixpath.normpath(
                posixpath.join(posixpath.dirname(self._resolv), target)
            )
            return await self._files.exchange(self._resolv, _OURS, owner=(0, 0), most=_MOST_RESOLV)

    async def _read_resolv(self) -> bytes | None:
        try:
            return b"".join([p async for p in self._files.read(self._resolv, length=_MOST_RESOLV)])
        except PathNotFoundError:
            return None

    async def _write_resolv(self) -> None:
        """Name our DNS. What cannot be written is noted: addresses can be reached without."""
        try:
            before = await self._exchange_resolv()
            if before != _OURS:
                self._before = before
            self._written = before is None or len(before) < _MOST_RESOLV
        except FileError as error:
            self._note_problem(f"was not written: {error}")

    async def _restore_resolv(self) -> None:
        """Put back what was there, unless somebody has changed it meanwhile."""
        written, self._written = self._written, False
        try:
            if not written or await self._read_resolv() != _OURS:
                return
            if self._before is None:
                await self._files.remove(self._resolv)
            else:
                await self._files.exchange(self._resolv, self._before, owner=(0, 0), most=0)
        except FileError as error:
            self._note_problem(f"was not restored: {error}")

    def _note_problem(self, what: str) -> None:
        self._log.add(EgressKind.POLICY, EgressDecision.FAILED, reason=f"{_RESOLV} {what}")


def _raise_descriptor_limit() -> int:
    """Ask for enough descriptors, and return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in ((_DESCRIPTORS, max(hard, _DESCRIPTORS)), (hard, hard)):
        if soft < wanted[0]:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
                return wanted[0]
    return soft
