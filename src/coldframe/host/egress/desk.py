"""Where every question of one sandbox for the outside is decided, noted and carried out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from coldframe.host import forks
from coldframe.host.egress import relay
from coldframe.host.egress.addresses import Address
from coldframe.host.egress.annex import Annex
from coldframe.host.egress.dial import CONNECT_TIMEOUT_S, open_connection
from coldframe.host.egress.events import EventLog
from coldframe.host.egress.flows import Budget, Flow, Meter
from coldframe.host.egress.policy import Engine, Verdict
from coldframe.host.egress.resolver import Names, TooManyLookupsError
from coldframe.protocol.network import EgressDecision, EgressKind

if TYPE_CHECKING:
    from coldframe.host.egress.certificates import Authority

MOST_FLOWS = 12_288
"""Connections of one sandbox at once."""
_MANY, _SMALL_BUFFER = 256, 1 << 16
"""Of so many, each gets less of the kernel's memory: slow readers would fill megabytes each."""
_ENDS_A_TURN = 32
"""Connections that are cut, in one turn of the event loop."""
_SCARCE = 0.25
"""The part of the node's own room that is taken before other processes carry too."""

Serve = Callable[[Flow], Awaitable[None]]


class RefusedError(Exception):
    """The policy does not allow it; it has been noted. The message says why."""


class UnreachableError(Exception):
    """It is allowed, but the other side cannot be reached; it has been noted."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where connections of all sandboxes of a node have room."""

    near: Budget
    """In the node itself."""
    annex: Annex
    """In other processes."""


class Desk:
    """One sandbox's egress, whichever listener it comes by."""

    def __init__(self, engine: Engine, names: Names, log: EventLog, room: Room) -> None:
        self.engine, self.names, self.log, self.room = engine, names, log, room
        self.meter = self._new_meter()
        self._authority: Authority | None = None
        self._flows: set[Flow] = set()
        self._far = 0
        """How many of them other processes carry."""
        self._passing: set[Flow] = set()
        """Those that begin, are connected or are handed to another process: that ends soon."""
        self._next = 1

    def _new_meter(self) -> Meter:
        policy = self.engine.policy
        return Meter(policy.rate_bytes_s, policy.max_bytes, self._spent)

    def _spent(self) -> None:
        for flow in list(self._flows):
            flow.end("the policy's max_bytes are used up")

    @property
    def authority(self) -> Authority:
        """Signs in the place of hosts that the sandbox has credentials for by TLS."""
        if self._authority is None:
            # Loaded by whoever needs it: it takes longer than the rest of a node's start.
            from coldframe.host.egress.certificates import Authority

            self._authority = Authority()
        return self._authority

    # --- the policy -------------------------------------------------------------------

    async def replace(self, engine: Engine) -> None:
        """Put another policy in force, for open connections too, before this returns."""
        before, self.engine = self.engine, engine
        self.meter = self._new_meter()
        # Nothing runs between here and the end of the loop: for all of them at one moment. Those
        # of other processes first, as they are told and not stopped.
        verdicts: dict[tuple[object, ...], Verdict] = {}
        halted: list[Flow] = []

        def cut(flow: Flow, reason: str) -> None:
            # To take a thousand out of the event loop is long; to let it carry nothing is not.
            if flow.halt(reason):
                halted.append(flow)
            else:
                flow.end(reason)

        secrets = bool(before.policy.credentials or engine.policy.credentials)
        for flow in sorted(self._flows, key=_is_near):
            flow.meter = self.meter
            if flow.address is None:
                continue
            reason = self._changed(flow, before) if secrets or flow.far else ""
            if reason:
                cut(flow, reason)
                continue
            key = (flow.address, flow.port, flow.name, flow.names, flow.spoken)
            verdict = verdicts.get(key) or verdicts.setdefault(key, self.verdict_of(flow))
            if not verdict.allowed:
                cut(flow, f"the new policy does not allow it: {verdict.reason}")
            elif verdict.names and not flow.watched:
                cut(flow, "the new policy does not allow it: it has not shown which host it means")
            else:
                flow.verdict = verdict
        self._end_in_turns(halted)
        far = [flow.task for flow in self._flows if flow.far and flow.cut and flow.task is not None]
        if far:
            await asyncio.wait(far)

    def _end_in_turns(self, halted: list[Flow]) -> None:
        for flow in halted[-_ENDS_A_TURN:]:
            flow.end(flow.cut)
        if left := halted[:-_ENDS_A_TURN]:
            asyncio.get_running_loop().call_soon(self._end_in_turns, left)

    def _changed(self, flow: Flow, before: Engine) -> str:
        """Say why a connection cannot go on under another policy, whatever that allows."""
        if flow.far and self.meter.limited:
            return "the new policy has limits, and this was one of too many connections"
        if any(before.credentials(name) != self.engine.credentials(name) for name in flow.names):
            return "the new policy has other credentials for its host"
        return ""

    def verdict_of(self, flow: Flow) -> Verdict:
        """Decide about a connection as it is known now."""
        assert flow.address is not None
        if flow.name is not None:
            return self.engine.named(flow.name, flow.address, flow.port, flow.spoken)
        return self.engine.address(flow.address, flow.port, flow.names)

    # --- connections ------------------------------------------------------------------

    @property
    def full_for_now(self) -> bool:
        """Whether the next connection finds no room yet, but will: it is better left to wait."""
        return bool(self._passing) and not self.room.near.has_room(self._near)

    @property
    def _near(self) -> int:
        return len(self._flows) - self._far

    def serve(self, kind: EgressKind, client: socket.socket, serve: Serve) -> None:
        """Take a connection of the sandbox's and serve it in a task of its own."""
        forks.own_socket(client).setblocking(False)
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        flow = Flow(self._next, kind, client, self.meter)
        self._next += 1
        full = len(self._flows) >= MOST_FLOWS
        if self.meter.spent or full or not self.room.near.take(self._near):
            why = "max_bytes are used up" if self.meter.spent else "too many connections are open"
            self.refuse(flow, why)
            relay.close(client, reset=True)
            return
        self._flows.add(flow)
        self._passing.add(flow)
        flow.task = asyncio.ensure_future(self._run(flow, serve))
        flow.task.add_done_callback(partial(self._end, flow))  # one cut at once never runs

    async def _run(self, flow: Flow, serve: Serve) -> None:
        self._passing.discard(flow)
        try:
            await serve(flow)
            flow.whole = True
        except (RefusedError, UnreachableError):
            flow.whole = flow.answered
        except asyncio.CancelledError:
            if not (flow.cut or flow.broken):
                raise
        except (OSError, TimeoutError) as error:
            self._note_break(flow, error)

    def _end(self, flow: Flow, _: asyncio.Task[None]) -> None:
        self._flows.discard(flow)
        self._passing.discard(flow)
        if not flow.far:
            self.room.near.give_back()
        flow.close(reset=not flow.whole)
        self._note_end(flow)

    async def carry(self, flow: Flow, down: relay.Direction | None = None) -> None:
        """Carry both ways to their end: here, or by another process when room is scarce.

        `down` is the way to the sandbox if it is carried already. Raises OSError: a side broke.
        """
        assert flow.upstream is not None
        if len(self._flows) > _MANY:
            for one in (flow.client, flow.upstream):
                for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                    one.setsockopt(socket.SOL_SOCKET, option, _SMALL_BUFFER)
        if (
            self.room.near.taken > _SCARCE
            and not self.meter.limited
            and self.room.annex.budget.take(self._far)
        ):
            self._far += 1
            try:
                if (down is None or down.let_go()) and await self._carry_far(flow):
                    return
                down = None if down is not None and down.ended.cancelled() else down
            finally:
                self._far -= 1
                self.room.annex.budget.give_back()
        up = relay.upward(flow, flow.upstream)
        down = down or relay.downward(flow, flow.upstream)
        flow.settled = True
        await relay.both(up, down)

    async def _carry_far(self, flow: Flow) -> bool:
        self._passing.add(flow)
        try:
            far = await self.room.annex.adopt(flow)
        except OSError:  # there is no process to be had
            return False
        finally:
            self._passing.discard(flow)
        self.room.near.give_back()
        await far.end(flow)
        return True

    def _note_break(self, flow: Flow, error: Exception) -> None:
        if not flow.announced and flow.address is not None:
            self.note(flow, EgressDecision.FAILED, str(error) or "timed out")

    def _note_end(self, flow: Flow) -> None:
        if flow.cut and not flow.announced and flow.address is not None:
            flow.announced = True
        if flow.announced:
            decision = EgressDecision.CUT if flow.cut else EgressDecision.CLOSED
            self.note(flow, decision, flow.cut)

    def note(self, flow: Flow, decision: EgressDecision, reason: str = "") -> None:
        """Note what became of a connection."""
        self.log.add(
            flow.kind,
            decision,
            connection=flow.number,
            name=flow.name or (flow.names[0] if flow.names else None),
            address=None if flow.address is None else str(flow.address),
            port=flow.port or None,
            rule=flow.verdict.rule,
            reason=reason,
            bytes_out=flow.bytes_out,
            bytes_in=flow.bytes_in,
        )

    def announce(self, flow: Flow) -> None:
        """Note once that a connection is allowed."""
        if not flow.announced:
            flow.announced = True
            self.note(flow, EgressDecision.ALLOWED)

    def refuse(self, flow: Flow, reason: str) -> RefusedError:
        """Note that it is not; raise what is returned."""
        self.note(flow, EgressDecision.REFUSED, reason)
        return RefusedError(reason)

    # --- names, sockets ---------------------------------------------------------------

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Return the addresses of an allowed name that may be told, and pin them.

        Raises:
            RefusedError: the policy names it not, or it has local addresses only. Noted.
            UnreachableError: nobody knows it now. Noted.
        """
        verdict = self.engine.name(name)
        if not verdict.allowed:
            raise self._no_name(name, EgressDecision.REFUSED, verdict.reason)
        try:
            found = await self.names.lookup(name)
        except TooManyLookupsError as error:
            raise self._no_name(name, EgressDecision.REFUSED, str(error)) from None
        except (OSError, TimeoutError) as error:
            why = f"it cannot be resolved now: {error}"
            raise self._no_name(name, EgressDecision.FAILED, why, verdict.rule) from None
        return self._tellable(name, found, verdict)

    def _tellable(
        self, name: str, found: tuple[Address, ...], verdict: Verdict
    ) -> tuple[Address, ...]:
        reasons = {address: self.engine.answer(address) for address in found}
        good = tuple(address for address, reason in reasons.items() if reason is None)
        for address in good:
            self.names.pin(name, address)
        if good or not found:
            reason = "" if good else "there is no such host"
            told = ", ".join(map(str, good)) or None
            self._note_name(name, EgressDecision.ALLOWED, reason, verdict.rule, told)
            return good
        why = next(iter(reasons.values())) or ""
        raise self._no_name(name, EgressDecision.REFUSED, why)

    def _no_name(
        self, name: str, decision: EgressDecision, why: str, rule: str | None = None
    ) -> RefusedError | UnreachableError:
        self._note_name(name, decision, why, rule, None)
        kind = RefusedError if decision is EgressDecision.REFUSED else UnreachableError
        return kind(why)

    def _note_name(
        self,
        name: str,
        decision: EgressDecision,
        reason: str,
        rule: str | None,
        address: str | None,
    ) -> None:
        self.log.add(EgressKind.DNS, decision, name=name, address=address, rule=rule, reason=reason)

    async def connect(self, flow: Flow) -> socket.socket:
        """Connect to where a connection is meant to go.

        Raises:
            UnreachableError: nobody answers there; noted.
        """
        assert flow.address is not None
        first, why = flow.address, ""
        # Inside, connecting has succeeded already, so who connected cannot try the next address.
        for address in (first, *self.names.siblings(flow.names, first)):
            if address != first and not self.engine.address(address, flow.port, flow.names).allowed:
                continue
            try:
                made = await self.dial(flow, address)
            except (OSError, TimeoutError) as error:
                why = why or str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
                continue
            flow.address = address
            return made
        self.note(flow, EgressDecision.FAILED, why)
        raise UnreachableError(why)

    async def dial(self, flow: Flow, address: Address) -> socket.socket:
        """Connect to an address at the connection's port. Raises OSError, TimeoutError."""
        self._passing.add(flow)
        try:
            flow.upstream = await open_connection(address, flow.port)
        finally:
            self._passing.discard(flow)
        return flow.upstream

    async def close(self) -> None:
        """End every connection, and return when all have ended."""
        flows = list(self._flows)
        for flow in flows:
            flow.end("the sandbox's egress has ended")
        await asyncio.gather(
            *(flow.task for flow in flows if flow.task is not None), return_exceptions=True
        )
        self.names.close()


def _is_near(flow: Flow) -> bool:
    return not flow.far
