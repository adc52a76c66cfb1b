"""Read HTTP/1 request heads strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from coldframe.host.egress.addresses import Address, canonical
from coldframe.protocol.network import host_name

MOST_HEAD = 1 << 15
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rf"({_TOKEN}) ([!-~\x80-\xff]+) HTTP/1\.([01])")
_FIELD = re.compile(rf"({_TOKEN}):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_URL = re.compile(r"(?i:(http|ws))://([^/?#@\s]+)([/?][^#\s]*)?")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?")
_FRAMING = frozenset({"host", "content-length", "transfer-encoding"})
"""A server that took these for its neighbour's alone would read another request than we did."""
_HOPS = frozenset({"proxy-connection", "proxy-authorization", "keep-alive"})


class BadRequestError(ValueError):
    """The request is not well formed, or not of a kind that is carried."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A host, by name or by address, and a port."""

    name: str | None
    address: Address | None
    port: int

    def __str__(self) -> str:
        return f"{self.name or self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body."""

    method: str
    target: str
    minor: int
    fields: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        """Return the values of all fields of that (lower-case) name."""
        return [value for key, value in self.fields if key.lower() == name]

    @property
    def host(self) -> Authority:
        """Whom it says it is for; port 80 unless it says another. Raises BadRequestError."""
        hosts = self.values("host")
        if len(hosts) != 1:
            raise BadRequestError("a request needs exactly one Host")
        return authority(hosts[0], 80)

    @property
    def upgrade(self) -> str | None:
        """What it wants to go on with, in lower case."""
        wanted = self.values("upgrade")
        return ", ".join(wanted).strip().lower() or None

    @property
    def length(self) -> int | None:
        """Bytes of body that follow; None: it comes in chunks. Raises BadRequestError."""
        lengths, codings = self.values("content-length"), self.values("transfer-encoding")
        if codings:
            if lengths or len(codings) > 1 or codings[0].lower() != "chunked" or self.minor == 0:
                raise BadRequestError("its body has no certain end")
            return None
        if not lengths:
            return 0
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise BadRequestError("its Content-Length is no number")
        return int(lengths[0])

    def encode(
        self, *, target: str, drop: frozenset[str], add: tuple[tuple[str, str], ...] = ()
    ) -> bytes:
        """Write it for the other side: without some fields, with others at the end."""
        lines = [f"{self.method} {target} HTTP/1.{self.minor}"]
        lines += [f"{key}: {value}" for key, value in self.fields if key.lower() not in drop]
        lines += [f"{key}: {value}" for key, value in add]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_head(data: bytes) -> Head:
    """Read a head that ends with its empty line. Raises BadRequestError."""
    lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    request = _REQUEST.fullmatch(lines[0])
    if request is None:
        raise BadRequestError("its first line is malformed")
    fields = []
    for line in lines[1:]:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise BadRequestError("a header line is malformed")
        fields.append((field[1], field[2]))
    head = Head(request[1], request[2], int(request[3]), tuple(fields))
    if _FRAMING & _listed(head, "connection"):
        raise BadRequestError("Connection names what decides whom and how much is meant")
    return head


def authority(text: str, default_port: int | None) -> Authority:
    """Read `host[:port]`. Raises BadRequestError: no host, or a number that stands for one."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise BadRequestError(f"{text[:80]!r} names no host")
    port = int(found[2]) if found[2] else default_port
    if port is None or not 1 <= port <= 65535:
        raise BadRequestError(f"{text[:80]!r} names no port")
    host = found[1].strip("[]")
    try:
        return Authority(None, canonical(ip_address(host)), port)
    except ValueError:
        pass
    try:
        return Authority(host_name(host), None, port)
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def absolute(target: str) -> tuple[Authority, str]:
    """Read a proxy request's target: whom, and the path there. Raises BadRequestError."""
    found = _URL.fullmatch(target)
    if found is None:
        raise BadRequestError("this proxy takes CONNECT and http:// only")
    path = found[3] or "/"
    return authority(found[2], 80), path if path.startswith("/") else "/" + path


def hop_fields(head: Head) -> frozenset[str]:
    """Fields that are meant for the proxy alone."""
    return _HOPS | (_listed(head, "connection") - {"", "close", "upgrade"})


def _listed(head: Head, name: str) -> frozenset[str]:
    """Return the words of a field that is a list, in lower case."""
    words = (word for value in head.values(name) for word in value.split(","))
    return frozenset(word.strip().lower() for word in words)


def refusal(status: str, reason: str) -> bytes:
    """An answer that says why, and is the last on its connection."""
    body = f"coldframe: {reason}\n".encode("ascii", "replace")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        "X-Coldframe-Egress: refused\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
