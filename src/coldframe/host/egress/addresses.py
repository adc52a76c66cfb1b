"""Which addresses are local: never reached unless a rule names them.

Pure, but for the question whether an address belongs to this machine, which the kernel answers.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
IsOwn = Callable[[Address], bool]

_METADATA = {
    ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.169.253",
        "169.254.169.123",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::253",
        "fd00:ec2::23",
        "fd20:ce::254",
    )
}
"""Where clouds hand out credentials to whoever asks."""

_LOCAL: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("an unspecified address", False, ("0.0.0.0/8", "::/128")),
    ("a loopback address", False, ("127.0.0.0/8", "::1/128")),
    ("a link-local address", False, ("169.254.0.0/16", "fe80::/10")),
    ("a multicast address", False, ("224.0.0.0/4", "ff00::/8")),
    ("a reserved address", False, ("240.0.0.0/4", "192.0.0.0/24", "100::/64")),
    ("a private address", True, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    ("a private address", True, ("fc00::/7", "fec0::/10", "198.18.0.0/15")),
    ("a shared (CGNAT) address", True, ("100.64.0.0/10",)),
)
_RANGES: tuple[tuple[Network, str, bool], ...] = tuple(
    (ip_network(text), kind, by_range) for kind, by_range, texts in _LOCAL for text in texts
)

_MAPPED, _COMPATIBLE = ip_network("::ffff:0:0/96"), ip_network("::/96")
_TRANSLATED, _TRANSLATED_HERE = ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48")
_TEREDO, _6TO4 = ip_network("2001::/32"), ip_network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)


def canonical(address: Address) -> Address:
    """Return the IPv4 address that an IPv4-mapped one means, others as they are."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def embedded(address: Address) -> IPv4Address | None:
    """Return the IPv4 address to which packets for an IPv6 address may be carried on."""
    if not isinstance(address, IPv6Address):
        return None
    number = int(address)
    low = IPv4Address(number & 0xFFFFFFFF)
    if address in _MAPPED or address in _TRANSLATED or address in _TRANSLATED_HERE:
        return low
    if address in _COMPATIBLE and number > 1:
        return low
    if address in _6TO4:
        return IPv4Address(number >> 80 & 0xFFFFFFFF)
    if address in _TEREDO:
        return IPv4Address(~number & 0xFFFFFFFF)
    return low if (number >> 32 & 0xFFFFFFFF) in _ISATAP else None


def local_kind(address: Address, is_own: IsOwn) -> tuple[str, bool] | None:
    """Say what kind of local address it is, and whether a rule may name it by a range.

    None: it is none. `is_own` tells the machine's own addresses.
    """
    if address in _METADATA:
        return "a cloud's metadata address", False
    for network, kind, by_range in _RANGES:
        if address in network:
            # Its own address is the more dangerous one: a range does not name it.
            return (kind, by_range) if not (by_range and is_own(address)) else _OWN
    within = embedded(address)
    if within is not None:
        found = local_kind(within, is_own)
        return (f"{found[0]} in disguise", False) if found else None
    return _OWN if is_own(address) else None


_OWN = ("an address of this machine", False)
