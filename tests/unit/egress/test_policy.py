"""What is local, and what a policy says: pure, so that every case can be listed."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.host.egress.addresses import canonical, local_kind
from coldframe.host.egress.policy import Engine
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.network import (
    Credential,
    NetworkPolicy,
    NetworkRule,
    host_name,
    network_policy,
)

OWN = ip_address("203.0.113.1")


def is_own(address: object) -> bool:
    """The machine of these tests has one address."""
    return address == OWN


def engine(*rules: str) -> Engine:
    """An engine for rules in text form."""
    return Engine(NetworkPolicy.parse(*rules), is_own)


_LOCAL_TEXT = """
0.0.0.0 0.1.2.3 127.0.0.1 127.255.255.254 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1
100.64.0.1 100.127.255.255 169.254.1.1 169.254.169.254 224.0.0.1 239.255.255.255 240.0.0.1
255.255.255.255 192.0.0.1 198.18.0.1 203.0.113.1 168.63.129.16 100.100.100.200 :: ::1 fe80::1
fc00::1 fd00::1 fd00:ec2::254 ff02::1 fec0::1 100::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1
::127.0.0.1 ::10.0.0.1 ::ffff:203.0.113.1 64:ff9b::10.0.0.1 64:ff9b::7f00:1 64:ff9b:1::a9fe:a9fe
2002:7f00:1:: 2002:a00:1::1 2002:a9fe:a9fe::1 2001:0:1:2:3:4:f5ff:fffe 2001:db8::5efe:10.0.0.1
2001:db8::200:5efe:127.0.0.1
"""
LOCAL = _LOCAL_TEXT.split()
_PUBLIC_TEXT = """
198.51.100.8 192.0.2.1 172.15.0.1 172.32.0.1 192.169.0.1 100.63.255.255 100.128.0.1 203.0.113.2
2001:db8:ffff::1 2001:db8::1 64:ff9b::c633:6408 2002:c633:6408::1 ::ffff:198.51.100.8
"""
PUBLIC = _PUBLIC_TEXT.split()


@pytest.mark.parametrize("text", LOCAL)
def test_public_never_means_a_local_address_in_any_form(text: str) -> None:
    """Each form is one that a resolver, a header or a redirect can give."""
    for address in {ip_address(text), canonical(ip_address(text))}:
        assert local_kind(address, is_own) is not None
        verdict = engine("public", "0.0.0.0/0", "::/0").address(address, 80)
        assert not verdict.allowed
        assert "no rule names it" in verdict.reason


@pytest.mark.parametrize("text", PUBLIC)
def test_public_means_every_address_that_is_not_local(text: str) -> None:
    """The control: a fence around everything would refuse all of the above too."""
    assert engine("public").address(canonical(ip_address(text)), 80).allowed


@pytest.mark.parametrize("text", LOCAL)
def test_rule_that_names_a_local_address_itself_allows_it(text: str) -> None:
    """A mirror in the private network is a wish that can be had, by its name."""
    address = canonical(ip_address(text))

    assert (
        engine(f"[{address}]:80" if address.version == 6 else f"{address}:80")
        .address(address, 80)
        .allowed
    )


@pytest.mark.parametrize(
    ("rule", "address", "allowed"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.1.0.0/16", "10.1.2.3", True),
        ("8.0.0.0/6", "10.1.2.3", False),
        ("fd12::/16", "fd12::1", True),
        ("fc00::/7", "fd12::1", True),
        ("100.64.0.0/10", "100.64.1.1", True),
        ("169.254.0.0/16", "169.254.1.1", False),
        ("127.0.0.0/8", "127.0.0.1", False),
        ("203.0.113.0/24", "203.0.113.1", False),
        ("203.0.113.0/24", "203.0.113.2", True),
    ],
)
def test_range_names_private_networks_but_never_the_machine_itself(
    rule: str, address: str, allowed: bool
) -> None:
    """A range that somebody wrote for a network must not open loopback or metadata by chance."""
    assert engine(rule).address(ip_address(address), 80).allowed is allowed


def test_private_range_does_not_open_the_machines_own_address_in_it() -> None:
    """The node stands in the private network too."""
    mine = Engine(NetworkPolicy.parse("10.0.0.0/8"), lambda a: a == ip_address("10.0.0.7"))

    assert mine.address(ip_address("10.0.0.8"), 80).allowed
    assert not mine.address(ip_address("10.0.0.7"), 80).allowed


def test_name_decides_for_its_port_and_protocol_only() -> None:
    """`web.example:443` says nothing about port 22 of the same machine."""
    mine = engine("tls://web.example:443", "web.example:8000-8100", "*.deep.example")
    address = ip_address("203.0.113.10")

    assert mine.name("web.example").allowed
    assert mine.address(address, 8050, ("web.example",)).names == ("web.example",)
    assert not mine.address(address, 22, ("web.example",)).allowed
    assert not mine.address(address, 8050, ()).allowed
    assert mine.named("web.example", address, 443, "tls").allowed
    assert not mine.named("web.example", address, 443, "http").allowed
    assert not mine.named("web.example", address, 443, "tcp").allowed
    assert not mine.name("deep.example").allowed
    assert mine.name("a.b.deep.example").allowed
    assert not mine.name("notdeep.example").allowed


@given(st.text(max_size=60))
def test_rule_text_is_read_back_as_it_was_or_refused(text: str) -> None:
    """Rules are written down in events and records; what is written must mean the same."""
    try:
        rule = NetworkRule.parse(text)
    except ValueError:
        return
    assert NetworkRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "web.example",
        "*.example:443",
        "203.0.113.0/24:80,443",
        "[2001:db8::1]:22",
        "2001:db8::/32",
        "tls://a.example:1-3",
        "http://203.0.113.7:80",
    ],
)
def test_rule_in_text_form_keeps_its_form(text: str) -> None:
    """Control of the above: these are rules."""
    assert str(NetworkRule.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "*",
        "*.",
        "a..b",
        "2130706433",
        "0x7f000001",
        "1.2.3",
        "127.1",
        "10.0.0.1/8",
        "a.example:0",
        "a.example:99999",
        "a.example:9-1",
        "a.example:x",
        "ftp://a.example",
        "é.fr",
        "full",
        "internet",
    ],
)
def test_text_that_is_no_rule_is_refused_by_its_words(text: str) -> None:
    """A rule that silently means nothing would be found by nobody."""
    with pytest.raises(InvalidRequestError) as refusal:
        network_policy([text])
    said = str(refusal.value)
    assert "\n" not in said
    assert "pydantic" not in said


def test_preset_that_does_not_exist_is_told_which_do() -> None:
    """So that nobody has to look it up."""
    with pytest.raises(InvalidRequestError, match=r"presets.*'apt', 'pip' or 'npm'"):
        network_policy("presets:conda")


@pytest.mark.parametrize("field", [{"value": "s3cret\n"}, {"host": "a b"}, {"header": "a b"}])
def test_credential_that_is_refused_is_not_shown(field: dict[str, str]) -> None:
    """A key that was read from a file ends with a newline, and errors end up in logs."""
    with pytest.raises(ValueError, match="Credential") as caught:
        Credential(**{"host": "a.example", "value": "s3cret", **field})  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value)


def test_names_are_compared_without_case_and_final_dot() -> None:
    """As DNS does; resolvers that mix cases on purpose must not be refused."""
    assert host_name("WeB.Example.") == "web.example"


def test_policies_that_allow_the_same_have_the_same_digest() -> None:
    """The fingerprint of a sandbox holds it."""
    one = NetworkPolicy.parse("presets:pip,apt", "WEB.example")
    two = NetworkPolicy.parse("presets:apt,pip", "web.example.")

    assert one.digest == two.digest
    assert one.digest != NetworkPolicy.parse("web.example").digest
    assert NetworkPolicy().empty
    assert not NetworkPolicy.parse("presets").empty
