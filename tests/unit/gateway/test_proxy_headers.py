"""Headers between a browser and what listens in a sandbox: what may pass to which side."""

from __future__ import annotations

import pytest

from coldframe.gateway.proxy_headers import Passage

PASSAGE = Passage(b"/p/token", 8000)


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "Proxy-Authorization",
        "Coldframe-On-Behalf",
        "X-Forwarded-For",
        "X-Real-IP",
        "Forwarded",
        "Via",
        "Connection",
        "Upgrade",
        "Transfer-Encoding",
    ],
)
def test_what_is_not_for_what_listens_does_not_reach_it(name: str) -> None:
    """Keys would be an agent's to use, and where a browser is, its own affair."""
    given = [(name.lower().encode(), b"secret"), (b"x-own", b"own")]
    assert PASSAGE.inward(given) == [(b"host", b"localhost:8000"), (b"x-own", b"own")]


@pytest.mark.parametrize(
    "name",
    [
        "Clear-Site-Data",
        "Strict-Transport-Security",
        "Service-Worker-Allowed",
        "Alt-Svc",
        "NEL",
        "Report-To",
        "Reporting-Endpoints",
        "Referrer-Policy",
        "Set-Cookie2",
        "Proxy-Authenticate",
        "Connection",
        "Transfer-Encoding",
    ],
)
def test_what_would_speak_for_the_whole_origin_does_not_get_out(name: str) -> None:
    """The origin is the service's, and that of everybody else's ports."""
    given = [(name.encode(), b"anything"), (b"X-Own", b"own")]
    assert PASSAGE.outward(given) == [(b"referrer-policy", b"same-origin"), (b"x-own", b"own")]
