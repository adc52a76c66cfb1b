"""Turn what a task declares of the network into policies.

`[environment]` is the baseline, `[agent]` and `[verifier]` override it, a step's own override
those. A task that says nothing is `public`, as its format has it (docs/adr/0042).
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import cast, get_args

from coldframe.protocol.network import NetworkPolicy, NetworkRule
from coldframe.rollouts import task
from coldframe.rollouts.fields import Table, brief
from coldframe.rollouts.task import NetworkMode


@dataclass(frozen=True)
class Declared:
    """A mode, and the policy that it means."""

    mode: NetworkMode
    policy: NetworkPolicy


PUBLIC = Declared("public", task.PUBLIC)
NO_NETWORK = Declared("no-network", NetworkPolicy())


def read_network(table: Table) -> Declared | None:
    """Read `network_mode` and `allowed_hosts`; None if nothing is declared."""
    mode = cast("NetworkMode | None", table.choice("network_mode", get_args(NetworkMode)))
    declared = table.has("allowed_hosts")
    hosts = table.texts("allowed_hosts")
    if mode != "allowlist":
        if declared:
            table.problem("allowed_hosts", 'means something only with network_mode = "allowlist"')
        return {"public": PUBLIC, "no-network": NO_NETWORK}.get(mode or "")
    rules = (rule for host in hosts if (rule := _rule(table, host)) is not None)
    return Declared(mode, NetworkPolicy(rules=tuple(dict.fromkeys(rules))))


def read_baseline(table: Table) -> Declared | None:
    """Read the same of an environment, and `allow_internet`, which is the older spelling."""
    declared = read_network(table)
    if table.has("allow_internet"):
        older = PUBLIC if table.flag("allow_internet") else NO_NETWORK
        if declared is not None and declared != older:
            table.problem("allow_internet", "and network_mode contradict each other")
        return declared or older
    return declared


def _rule(table: Table, host: str) -> NetworkRule | None:
    """Return the rule of an entry: a host name, `*.name`, an address or a range; no ports."""
    text = host.strip().lower().rstrip(".")
    try:
        if "/" in text or ":" in text:
            return NetworkRule(cidr=str(ip_network(text)))
        return NetworkRule.parse(text)
    except ValueError:
        table.problem(
            "allowed_hosts",
            f"has {brief(host)}, which is no host name, *.name, address or range of addresses",
        )
        return None
