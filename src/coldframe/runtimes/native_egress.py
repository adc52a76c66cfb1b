"""A native sandbox's egress: its gateway while it has a policy, its events as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from functools import partial

from coldframe.host.egress.events import EventLog
from coldframe.host.egress.gateway import Gateway
from coldframe.host.egress.namespace import open_network
from coldframe.host.egress.policy import Engine
from coldframe.host.egress.presets import cached_preset_rules, preset_rules
from coldframe.host.rootfs import RootFiles
from coldframe.host.spawner import Place
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    FileError,
    InvalidRequestError,
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
from coldframe.runtimes.native_network import NodeNetwork
from coldframe.runtimes.native_resolv import ResolvConf
from coldframe.runtimes.native_trust import Trust


def require_whole(policy: NetworkPolicy) -> None:
    """Raise InvalidRequestError for a policy that was read from a record, without its secrets."""
    if policy.redacted:
        raise InvalidRequestError("this policy's secrets were left out when it was recorded")


class NativeEgress:
    """One sandbox's."""

    def __init__(self, sandbox_id: str, node: NodeNetwork) -> None:
        self._sandbox_id, self._node = sandbox_id, node
        self._place: Place
        self._resolv: ResolvConf
        self._trust: Trust
        self._log = EventLog(sandbox_id)
        self._begun: asyncio.Task[Gateway] | None = None
        """Opens for a sandbox that is still being made."""
        self._gateway: Gateway | None = None
        self._changing = asyncio.Lock()
        self._ended = False

    def begin(self, place: Place, policy: NetworkPolicy) -> None:
        """Open already, while the rest of the sandbox is made: there is its network, but no root.

        `set_policy` of that policy goes on with it, `withdraw` takes it back.
        """
        rules = cached_preset_rules(policy.presets)
        if rules is not None:
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
        if not self._resolv.written and added is None:
            return None
        trusted = None if added is None else added.decode("ascii")
        return json.dumps({**self._resolv.note(), "trusted": trusted})

    async def go_on(self, policy: NetworkPolicy, resolv_before: str | None) -> None:
        """Put in force again what another process had in force.

        Where that cannot be done nothing but loopback can be reached, and an event says why.
        """
        if resolv_before is not None:
            told = json.loads(resolv_before)
            self._resolv.go_on(told)
            if told["trusted"] is not None:
                with contextlib.suppress(FileError):  # it stays, and is of no use to anybody
                    await self._trust.replace(told["trusted"].encode("ascii"))
        try:
            await self.set_policy(policy)
        except ColdframeError as error:
            _note_problem(self._log, str(error))

    def settle(self, place: Place, files: RootFiles) -> None:
        """The sandbox is made."""
        self._place = place
        # Not a method of ours: a cycle would keep all that is here until the next full look for
        # garbage, which a service puts off.
        self._resolv = ResolvConf(files, partial(_note_problem, self._log))
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
        require_whole(policy)
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
            await self._resolv.write()
            await self._trust_for(policy, gateway)
        except BaseException:
            await gateway.close()
            await self._resolv.restore()
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
            await self._resolv.restore()
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
            _note_problem(
                self._log, f"the certificate of credentials could not be put in its place: {error}"
            )


def _note_problem(log: EventLog, reason: str) -> None:
    log.add(EgressKind.POLICY, EgressDecision.FAILED, reason=reason)
