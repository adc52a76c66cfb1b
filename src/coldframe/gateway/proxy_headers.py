"""Which headers pass between a browser and what listens in a sandbox, and as what.

Neither side is trusted with what belongs to the other. What listens sees itself as
`localhost:PORT`: it learns neither the token nor the caller's key nor other cookies. The browser is
told nothing that would reach beyond the token's own path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NEVER_IN = _HOP_BY_HOP | {
    b"authorization",
    b"content-length",
    b"cookie",
    b"expect",
    b"forwarded",
    b"host",
    b"origin",
    b"proxy-authorization",
    b"referer",
    b"via",
    b"x-real-ip",
}
_NEVER_OUT = _HOP_BY_HOP | {
    b"alt-svc",
    b"clear-site-data",
    b"nel",
    b"proxy-authenticate",
    b"referrer-policy",
    b"report-to",
    b"reporting-endpoints",
    b"service-worker-allowed",
    b"set-cookie2",
    b"strict-transport-security",
}
"""What would speak for the whole origin, which is the service's and other sandboxes' too."""
_OURS_IN = (b"coldframe-", b"x-forwarded-", b"sec-websocket-")
_COOKIE = re.compile(rb"\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*=\s*([^;]*)")


@dataclass(frozen=True)
class Passage:
    """The way to one port by one token."""

    prefix: bytes
    """`/p/TOKEN`."""
    port: int

    def target(self, raw_path: bytes, query: bytes) -> bytes:
        """What is asked of the port, byte by byte as it came."""
        return raw_path.removeprefix(self.prefix) + (query and b"?" + query)

    @property
    def host(self) -> bytes:
        """As whom what listens sees itself."""
        return b"localhost:%d" % self.port

    @property
    def _cookie_prefix(self) -> bytes:
        return b"cf-%s-" % hashlib.sha256(self.prefix).hexdigest()[:12].encode()

    def inward(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """Return what listens may see of a request's headers; lengths are not among them."""
        found = list(headers)
        named = _named_by_connection(found)
        passed: Headers = [(b"host", self.host)]
        for name, value in found:
            if name == b"origin":
                passed.append((name, b"http://" + self.host))
            elif name == b"referer":
                _, here, rest = value.partition(self.prefix + b"/")
                if here:
                    passed.append((name, b"http://%s/%s" % (self.host, rest)))
            elif name == b"cookie":
                passed += self._cookies(value)
            elif not (name in _NEVER_IN or name in named or name.startswith(_OURS_IN)):
                passed.append((name, value))
        return passed

    def outward(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """Return what the browser may see of an answer's headers."""
        found = [(name.lower(), value) for name, value in headers]
        named = _named_by_connection(found)
        passed: Headers = [(b"referrer-policy", b"same-origin")]
        for name, value in found:
            if name in {b"location", b"content-location"}:
                passed.append((name, self._moved(value)))
            elif name == b"set-cookie":
                passed += self._set_cookie(value)
            elif not (name in _NEVER_OUT or name in named):
                passed.append((name, value))
        return passed

    def _moved(self, location: bytes) -> bytes:
        """Keep a redirect to itself below the token's path."""
        for origin in (b"http://" + self.host, b"http://127.0.0.1:%d" % self.port):
            if location == origin or location.startswith(origin + b"/"):
                location = location.removeprefix(origin) or b"/"
                break
        if location.startswith(b"/") and not location.startswith((b"//", b"/\\")):
            return self.prefix + location
        return location

    def _cookies(self, value: bytes) -> Headers:
        """Return the cookies that this token's answers have set, by their own names."""
        ours = self._cookie_prefix
        kept = [one.strip() for one in value.split(b";") if one.strip().startswith(ours)]
        return [(b"cookie", b"; ".join(one.removeprefix(ours) for one in kept))] if kept else []

    def _set_cookie(self, value: bytes) -> Headers:
        """Bind a cookie to the token's path, under a name that no other token's has."""
        match = _COOKIE.match(value)
        if match is None:
            return []
        first, *attributes = value.split(b";")
        kept = [
            part.strip()
            for part in attributes
            if part.partition(b"=")[0].strip().lower() not in {b"domain", b"path"}
        ]
        pair = self._cookie_prefix + first.strip()
        return [(b"set-cookie", b"; ".join([pair, *kept, b"Path=%s/" % self.prefix]))]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    return frozenset(
        part.strip().lower()
        for name, value in headers
        if name == b"connection"
        for part in value.split(b",")
    )
