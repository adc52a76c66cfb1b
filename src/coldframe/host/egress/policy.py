"""Decide what a policy allows. Pure: no I/O, no time; the kernel is asked through `IsOwn`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_network

from coldframe.host.egress.addresses import Address, IsOwn, Network, local_kind
from coldframe.protocol.network import Credential, NetworkPolicy, NetworkRule

PUBLIC = "public"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided, and why."""

    allowed: bool
    rule: str | None = None
    """The rule that allowed it, in text form."""
    reason: str = ""
    """Why it was refused."""
    names: tuple[str, ...] = ()
    """Names of which the connection must show one; none: it may say what it likes."""
    protocols: frozenset[str] = frozenset({"tcp"})
    """What it may speak; `tcp` is everything."""


@dataclass(frozen=True, slots=True)
class _HostRule:
    rule: NetworkRule
    text: str


@dataclass(frozen=True, slots=True)
class _AddressRule:
    rule: NetworkRule
    text: str
    network: Network


class Engine:
    """One policy, made ready for questions."""

    def __init__(
        self, policy: NetworkPolicy, is_own: IsOwn, presets: Iterable[NetworkRule] = ()
    ) -> None:
        """`presets` are the rules that the policy's presets stand for on this machine."""
        self.policy = policy
        self._is_own = is_own
        self._exact: dict[str, list[_HostRule]] = {}
        self._below: dict[str, list[_HostRule]] = {}
        self._addresses: list[_AddressRule] = []
        self._credentials: dict[str, list[Credential]] = {}
        for rule in (*policy.rules, *presets):
            self._add(rule)
        for credential in policy.credentials:
            self._credentials.setdefault(credential.host, []).append(credential)

    def _add(self, rule: NetworkRule) -> None:
        if rule.cidr is not None:
            self._addresses.append(_AddressRule(rule, str(rule), ip_network(rule.cidr)))
            return
        host = rule.host or ""
        table = self._below if host.startswith("*.") else self._exact
        table.setdefault(host.removeprefix("*."), []).append(_HostRule(rule, str(rule)))

    def credentials(self, name: str) -> list[Credential]:
        """Return what is added to requests for a host."""
        return self._credentials.get(name, [])

    def ends_tls(self, name: str) -> bool:
        """Whether TLS with a host is ended by the node, which adds a credential."""
        return any(one.tls for one in self.credentials(name))

    # --- names ------------------------------------------------------------------------

    def name(self, name: str) -> Verdict:
        """Decide whether a name may be resolved, and so be asked of anybody outside."""
        found = next(self._rules_for(name), None)
        if found is not None:
            return Verdict(True, found.text)
        if self.policy.public:
            return Verdict(True, PUBLIC)
        return Verdict(False, reason="no rule names this host")

    def _rules_for(self, name: str) -> Iterator[_HostRule]:
        yield from self._exact.get(name, ())
        _, _, rest = name.partition(".")
        while rest:
            yield from self._below.get(rest, ())
            _, _, rest = rest.partition(".")

    def _host_rules(self, name: str, port: int) -> list[_HostRule]:
        return [one for one in self._rules_for(name) if _has_port(one.rule, port)]

    def answer(self, address: Address) -> str | None:
        """Say why an address may not be told to who asked for a name; None: it may."""
        local = local_kind(address, self._is_own)
        if local is None:
            return None
        if any(address in one.network and _names(one.network, local) for one in self._addresses):
            return None
        return f"it resolves to {local[0]} ({address}), and no rule names that"

    # --- connections ------------------------------------------------------------------

    def address(self, address: Address, port: int, names: Iterable[str] = ()) -> Verdict:
        """Decide about a connection to an address.

        `names` are those that were resolved to it; the connection must then show one of them,
        unless a rule names the address or everything public is allowed.
        """
        local = local_kind(address, self._is_own)
        found = [
            one
            for one in self._addresses
            if address in one.network and _has_port(one.rule, port) and _names(one.network, local)
        ]
        if found:
            protocols = frozenset(one.rule.protocol for one in found)
            return Verdict(True, found[0].text, protocols=protocols)
        if local is not None:
            return Verdict(False, reason=f"{local[0]}, and no rule names it")
        if self.policy.public:
            return Verdict(True, PUBLIC)
        return self._by_name(port, tuple(names))

    def _by_name(self, port: int, names: tuple[str, ...]) -> Verdict:
        rules = {name: found for name in names if (found := self._host_rules(name, port))}
        if rules:
            first = next(iter(rules.values()))[0]
            protocols = frozenset(one.rule.protocol for found in rules.values() for one in found)
            return Verdict(True, first.text, names=tuple(rules), protocols=protocols)
        if not names:
            return Verdict(False, reason="no rule names this address, and no allowed host has it")
        return Verdict(False, reason=f"no rule names port {port} of {names[0]}")

    def named(self, name: str, address: Address, port: int, spoken: str = "tcp") -> Verdict:
        """Decide about a connection that has shown a name and what it speaks."""
        verdict = self.address(address, port, (name,))
        if not verdict.allowed or not verdict.names:
            return _spoken(verdict, spoken)
        rules = [
            one for one in self._host_rules(name, port) if one.rule.protocol in ("tcp", spoken)
        ]
        if rules:
            return Verdict(True, rules[0].text, names=(name,))
        return _spoken(verdict, spoken)


def _spoken(verdict: Verdict, spoken: str) -> Verdict:
    if not verdict.allowed or verdict.protocols & {"tcp", spoken}:
        return verdict
    wanted = " or ".join(sorted(verdict.protocols))
    return Verdict(False, reason=f"{verdict.rule} allows {wanted} only")


def _has_port(rule: NetworkRule, port: int) -> bool:
    return not rule.ports or any(first <= port <= last for first, last in rule.ports)


def _names(network: Network, local: tuple[str, bool] | None) -> bool:
    """Whether a range in a rule names what may be a local address."""
    if local is None or network.prefixlen == network.max_prefixlen:
        return True
    return local[1] and not _reaches_out(network)


def _reaches_out(network: Network) -> bool:
    """Whether a range holds more than one kind of private addresses: `0.0.0.0/0` names none."""
    first = local_kind(network[0], _never)
    last = local_kind(network[-1], _never)
    return first is None or first != last or network.prefixlen < 7


def _never(address: Address) -> bool:
    return False
