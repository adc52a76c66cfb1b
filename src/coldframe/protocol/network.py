"""What a sandbox may reach, and what is said of each decision. Frozen, checked when made.

Nothing is allowed that no rule names. Text forms of rules: `HOST`, `*.HOST`, `ADDRESS`, `CIDR`,
each with `:PORTS` (`443`, `80,443`, `8000-8100`) and, before all, `tls://` or `http://`; an IPv6
address with ports stands in brackets.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from enum import StrEnum
from ipaddress import ip_network
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SerializationInfo,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.text import excerpt

Preset = Literal["apt", "pip", "npm"]
PRESETS: tuple[Preset, ...] = ("apt", "pip", "npm")
Ports = tuple[tuple[int, int], ...]

HIDDEN = "**********"
"""Stands for a secret wherever it was not asked for."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_FORM = re.compile(
    r"(?:(?P<protocol>tcp|tls|http)://)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:/\d+)?)\]|(?P<bare>[^:\[\]]+|[0-9A-Fa-f:.]+(?:/\d+)?))"
    r"(?::(?P<ports>[0-9,\-]+))?"
)


class _Model(BaseModel):
    # A credential that is refused must not be shown by its refusal.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def host_name(text: str) -> str:
    """Return a host name as names are compared: lower case, no final dot.

    Raises:
        ValueError: it is none. What some resolvers take for a number (`2130706433`, `0x7f.1`)
            is none either: addresses are written as such.
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not (0 < len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels)):
        raise ValueError(f"{text[:80]!r} is no host name (beyond ASCII: write its xn-- form)")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{text[:80]!r} is a number, not a host name")
    return name


class NetworkRule(_Model):
    """Allows connections to a host or to addresses."""

    host: str | None = None
    """A name, or `*.name`: every name below it, but not itself."""
    cidr: str | None = None
    """An address or a range of them. Exactly one of `host` and `cidr` is given."""
    ports: Ports = ()
    """Ranges, both ends included; none: every port."""
    protocol: Literal["tcp", "tls", "http"] = "tcp"
    """`tls` or `http` (not encrypted): the client's first bytes must be that; `tcp`: anything."""

    @field_validator("host")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        if value is None:
            return None
        star = "*." if value.startswith("*.") else ""
        return star + host_name(value.removeprefix(star))

    @field_validator("cidr")
    @classmethod
    def _cidr(cls, value: str | None) -> str | None:
        return None if value is None else str(ip_network(value))

    @field_validator("ports")
    @classmethod
    def _ports(cls, value: Ports) -> Ports:
        for first, last in value:
            if not 1 <= first <= last <= 65535:
                raise ValueError(f"ports {first}-{last} are not in 1..65535")
        return value

    @model_validator(mode="after")
    def _one_target(self) -> NetworkRule:
        if (self.host is None) == (self.cidr is None):
            raise ValueError("give exactly one of host and cidr")
        return self

    @classmethod
    def parse(cls, text: str) -> NetworkRule:
        """Read the text form of a rule.

        Raises:
            ValueError: it is none; the message holds it.
        """
        form = _FORM.fullmatch(text.strip())
        if form is None:
            raise ValueError(f"{text[:120]!r} is no rule: write HOST, *.HOST or CIDR, then :PORTS")
        target = form["bracketed"] or form["bare"]
        ports = tuple(_port_range(part) for part in (form["ports"] or "").split(",") if part)
        protocol = form["protocol"] or "tcp"
        try:
            network = ip_network(target)
        except ValueError:
            if "/" in target or ":" in target:
                raise ValueError(f"{target[:80]!r} is no address range") from None
            place = {"host": target}
        else:
            place = {"cidr": str(network)}
        try:
            return cls.model_validate({**place, "ports": ports, "protocol": protocol})
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"rule {text[:120]!r}: {reason}") from None

    def __str__(self) -> str:
        """The text form; `parse` reads it."""
        scheme = "" if self.protocol == "tcp" else f"{self.protocol}://"
        target = self.host or self.cidr or ""
        if self.cidr is not None:
            network = ip_network(self.cidr)
            if network.prefixlen == network.max_prefixlen:
                target = str(network.network_address)
            if self.ports and network.version == 6:
                target = f"[{target}]"
        ranges = (str(a) if a == b else f"{a}-{b}" for a, b in self.ports)
        return scheme + target + (f":{','.join(ranges)}" if self.ports else "")


def _port_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{excerpt(text)} is no port or range of ports")
    return int(first), int(last) if dash else int(first)


class Credential(_Model):
    """A header that the node adds to HTTP requests for a host; the sandbox never holds it.

    The sandbox asks by plain HTTP on port 80, or, with `tls`, by HTTPS on port 443, which the node
    answers by a certificate that only this sandbox trusts. With `tls`, the node itself speaks TLS
    with the host, on port 443, and checks its certificate. It allows nothing: a rule must name the
    host, and the port that the sandbox asks.
    """

    host: str
    header: str = "Authorization"
    value: SecretStr
    tls: bool = True

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        return host_name(value)

    @field_validator("header")
    @classmethod
    def _header(cls, value: str) -> str:
        if not _HEADER.fullmatch(value):
            raise ValueError(f"{excerpt(value)} is no header name")
        return value

    @field_validator("value")
    @classmethod
    def _value(cls, value: SecretStr) -> SecretStr:
        secret = value.get_secret_value()
        if not secret.isascii() or not secret.isprintable():
            raise ValueError("a header's value is printable ASCII, with no newline at its end")
        return value

    @field_serializer("value", when_used="json")
    def _dump(self, value: SecretStr, info: SerializationInfo) -> str:
        shown = isinstance(info.context, dict) and info.context.get("secrets") is True
        return value.get_secret_value() if shown else HIDDEN


class NetworkPolicy(_Model):
    """What a sandbox may reach. The default is nothing: loopback only, at no cost."""

    rules: tuple[NetworkRule, ...] = Field(default=(), max_length=4096)
    public: bool = False
    """Everything that is not local: neither private, nor of this machine, nor metadata."""
    presets: tuple[Preset, ...] = ()
    """Where this node's own apt, pip and npm fetch packages."""
    credentials: tuple[Credential, ...] = ()
    rate_bytes_s: Annotated[int, Field(ge=1024)] | None = None
    """How fast all connections together may carry bytes, both ways counted; None: any."""
    max_bytes: Annotated[int, Field(ge=0)] | None = None
    """How much they may carry until the next policy, both ways counted; None: any amount."""

    @field_validator("presets")
    @classmethod
    def _ordered(cls, value: tuple[Preset, ...]) -> tuple[Preset, ...]:
        return tuple(sorted(set(value)))

    @property
    def empty(self) -> bool:
        """Whether it allows nothing."""
        return not (self.rules or self.public or self.presets)

    @property
    def redacted(self) -> bool:
        """Whether it was read from a record, which holds no secrets: it cannot be used."""
        return any(one.value.get_secret_value() == HIDDEN for one in self.credentials)

    @property
    def digest(self) -> str:
        """Hex digest of what it allows; equal for equal policies, whatever their secrets."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json")).encode()).hexdigest()

    def dump_with_secrets(self) -> str:
        """JSON that `model_validate_json` reads back whole; never for a record or a log."""
        return self.model_dump_json(context={"secrets": True})

    @classmethod
    def parse(cls, *rules: str, **options: Any) -> NetworkPolicy:
        """Make a policy of text forms: `public`, `presets`, `presets:apt`, or rules.

        Raises:
            ValueError: one of them is none.
        """
        made: list[NetworkRule] = []
        presets: list[str] = []
        public = False
        for text in rules:
            word, _, chosen = text.partition(":")
            if word == "public" and not chosen:
                public = True
            elif word == "presets":
                presets += chosen.split(",") if chosen else PRESETS
            else:
                rule = NetworkRule.parse(text)
                if rule.host and "." not in rule.host and not rule.ports:
                    raise ValueError(
                        f"{text[:80]!r} would be a host: write {rule.host}:PORTS if it is one, "
                        "else `public`, `presets` or `none`"
                    )
                made.append(rule)
        return cls(rules=tuple(made), public=public, presets=tuple(presets), **options)  # type: ignore[arg-type]  # checked


def _sentence(error: ValueError) -> str:
    """What is wrong, without what was given: that may be a secret."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


NetworkLike: TypeAlias = NetworkPolicy | str | Iterable[str] | None
"""A policy, the text form of one rule or several; None or `none`: no egress."""


def network_policy(value: NetworkLike) -> NetworkPolicy:
    """Make a policy of what a caller gives.

    Raises:
        InvalidRequestError: a text is no rule.
    """
    if value is None or value == "none":
        return NetworkPolicy()
    if isinstance(value, NetworkPolicy):
        return value
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("network: rules are text")
    try:
        return NetworkPolicy.parse(*texts)
    except ValueError as error:
        raise InvalidRequestError(f"network: {_sentence(error)}") from None


# --- events ---------------------------------------------------------------------------


class EgressKind(StrEnum):
    """What asked."""

    DNS = "dns"
    TCP = "tcp"
    """A connection that was redirected."""
    HTTP = "http"
    """A request to the proxy, or on a connection whose requests are read."""
    CONNECT = "connect"
    """A tunnel through the proxy."""
    UDP = "udp"
    POLICY = "policy"
    """The policy itself was changed."""


class EgressDecision(StrEnum):
    """What became of it."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    FAILED = "failed"
    """Allowed, but the other side could not be reached."""
    CLOSED = "closed"
    """An allowed connection has ended; the event has its bytes."""
    CUT = "cut"
    """It was ended by a new policy or a limit; the event has its bytes."""


class EgressEvent(_Model):
    """One decision. Names are the sandbox's words: hostile, but checked to be host names."""

    seq: int
    """Counts up by one; the cursor after it is `seq + 1`."""
    at: float
    sandbox_id: str
    kind: EgressKind
    decision: EgressDecision
    connection: int | None = None
    """Ties the end of a connection to its beginning."""
    name: str | None = None
    address: str | None = None
    port: int | None = None
    rule: str | None = None
    """The rule that allowed it, in text form."""
    reason: str = ""
    bytes_out: int = 0
    """From the sandbox."""
    bytes_in: int = 0


class EgressEvents(_Model):
    """Events from a cursor on."""

    events: tuple[EgressEvent, ...]
    next_cursor: int
    dropped: int = 0
    """Events after the cursor that are no longer kept."""
