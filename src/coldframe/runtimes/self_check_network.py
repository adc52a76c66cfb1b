"""Checks of a runtime: network policies. They need nobody outside: what is refused stays inside."""

from __future__ import annotations

from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.models import SandboxSpec
from coldframe.protocol.network import EgressDecision, EgressEvent, EgressKind, NetworkPolicy
from coldframe.runtimes.self_check_lab import (
    Bench,
    Checks,
    Lab,
    NotApplicableError,
    equal,
    expect,
    raises,
)

check = Checks()

_ELSEWHERE = NetworkPolicy.parse("198.51.100.1:9")
_EVERYTHING = NetworkPolicy.parse("public")
_METADATA = "169.254.169.254"
_CLIENTS = {
    "python3": (
        "python3 -c \"import socket, sys; c = socket.create_connection(('{0}', {1}), 10);"
        " sys.exit(c.recv(1) == b'')\""
    ),
    "busybox": "busybox nc -w 10 {0} {1} </dev/null",
}
"""Command lines that connect."""


async def _try(bench: Bench, address: str, port: int) -> list[EgressEvent]:
    """Connect to an address from within; return what was refused meanwhile."""
    before = bench.handle.egress_events(0, 10_000).next_cursor
    for program, line in _CLIENTS.items():
        if (await bench.run(f"command -v {program}")).ok:
            await bench.run(line.format(address, port))
            break
    else:
        raise NotApplicableError(f"the image has none of {', '.join(_CLIENTS)}")
    events = bench.handle.egress_events(before, 10_000).events
    return [event for event in events if event.decision is EgressDecision.REFUSED]


@check()
async def policy_that_cannot_be_enforced_is_refused(lab: Lab) -> None:
    """Running with another network than was asked for is a leak, or a task that cannot be done."""
    if lab.runtime.capabilities().egress:
        raise NotApplicableError("this runtime enforces policies")
    spec = SandboxSpec(image=lab.image.name, network=_ELSEWHERE)
    await raises(CapabilityError, lab.runtime.create("sb-x-x", spec, lab.image), "create with it")
    async with lab.sandbox() as bench:
        await raises(CapabilityError, bench.handle.set_network(_ELSEWHERE), "setting it")
        await bench.handle.set_network(NetworkPolicy())


@check("egress")
async def connection_that_no_rule_names_is_refused_and_noted(lab: Lab) -> None:
    """Default deny, and every refusal can be seen by who asks for events."""
    async with lab.sandbox(network=_ELSEWHERE) as bench:
        refused = await _try(bench, "203.0.113.77", 9)
        equal(
            [(e.kind, e.address, e.port) for e in refused],
            [(EgressKind.TCP, "203.0.113.77", 9)],
            "refused",
        )
        expect(bool(refused[0].reason), "the refusal has no reason")


@check("egress")
async def metadata_is_refused_whatever_is_public(lab: Lab) -> None:
    """A cloud's metadata service hands out the machine's credentials to whoever asks."""
    async with lab.sandbox(network=_EVERYTHING) as bench:
        refused = await _try(bench, _METADATA, 80)
        equal([(e.address, e.port) for e in refused], [(_METADATA, 80)], "refused")


@check("egress")
async def policy_can_be_set_changed_and_taken_away(lab: Lab) -> None:
    """A phase's policy ends with it, and nothing of ours is counted as the sandbox's."""
    async with lab.sandbox() as bench:
        equal(await _try(bench, "203.0.113.77", 9), [], "events without a policy")
        for policy in (_ELSEWHERE, _EVERYTHING, NetworkPolicy(), _ELSEWHERE):
            await bench.handle.set_network(policy)
            equal(await bench.handle.listening_ports(), (), "ports of the sandbox's own")
        events = bench.handle.egress_events(0, 10_000).events
        changes = [event for event in events if event.kind is EgressKind.POLICY]
        equal(len(changes), 4, "changes that were noted")
        equal(len(await _try(bench, "203.0.113.77", 9)), 1, "refusals in the end")


@check("egress")
async def events_are_followed_by_a_cursor(lab: Lab) -> None:
    """A recorder reads what came since it last looked, and knows what it missed."""
    async with lab.sandbox(network=_ELSEWHERE) as bench:
        for port in (1, 2, 3):
            await _try(bench, "203.0.113.77", port)
        first = bench.handle.egress_events(0, 2)
        rest = bench.handle.egress_events(first.next_cursor, 10_000)
        equal((len(first.events), first.dropped, rest.dropped), (2, 0, 0), "the first page")
        numbers = [event.seq for event in (*first.events, *rest.events)]
        equal(numbers, list(range(len(numbers))), "numbers of all events")
        equal(bench.handle.egress_events(rest.next_cursor, 10).events, (), "nothing new")
