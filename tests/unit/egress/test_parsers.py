"""Parsers of what sandboxes say: strict, bounded, and never an exception that was not meant."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.host.egress import dns
from coldframe.host.egress.events import EventLog
from coldframe.host.egress.http import BadRequestError, absolute, authority, parse_head
from coldframe.host.egress.openings import MOST_BYTES, MalformedError, Opening, look
from coldframe.protocol.network import EgressDecision, EgressKind


def greeting(name: str | None) -> bytes:
    """A real client's first TLS bytes."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    if name is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_tls_greeting_shows_its_name_once_it_is_whole() -> None:
    """It may come byte by byte, and cut into records as small as one likes."""
    whole = greeting("web.example")

    assert look(whole) == Opening("tls", "web.example")
    assert look(greeting(None)) == Opening("tls", None)
    assert all(look(whole[:end]) is None for end in range(1, len(whole)))
    message = whole[5:]

    def cut(size: int) -> bytes:
        parts = [message[i : i + size] for i in range(0, len(message), size)]
        return b"".join(b"\x16\3\1" + struct.pack("!H", len(part)) + part for part in parts)

    assert look(cut(40)) == Opening("tls", "web.example")
    with pytest.raises(MalformedError):
        look(cut(1))


@pytest.mark.parametrize("at", range(5, 160))
def test_tls_greeting_that_is_damaged_never_breaks_the_parser(at: int) -> None:
    """Every byte can be a lie."""
    whole = bytearray(greeting("web.example"))
    whole[at] ^= 0xFF
    with contextlib.suppress(MalformedError):
        look(bytes(whole))


@given(st.binary(max_size=300))
def test_any_bytes_are_told_or_refused(data: bytes) -> None:
    """Nothing but a verdict, whatever comes; and the whole of it always has one."""
    with contextlib.suppress(MalformedError):
        look(data)
        assert look(data, whole=True) is not None


@pytest.mark.parametrize(
    ("data", "spoken"),
    [
        (b"GET / HTTP/1.1\r\n", "http"),
        (b"\r\n\r\nGET / HTTP/1.1\r\n", "http"),
        (b"get / http/1.1\r\n", "http"),
        (b"X~Y / HTTP/9.9\n", "http"),
        (b"PRI * HTTP/2.0\r\n", "http2"),
        (b"SSH-2.0-client\r\n", "tcp"),
        (b"EHLO web.example\r\n", "tcp"),
        (b"\0\0\0\x08", "tcp"),
        (b"GE", None),
        (b"A" * 41, None),
        (b"GET\t", None),
        (b"GET /\1\2", None),
        (b"GET\x0b/ HTTP/1.1\r\n", "http"),
        (b" GET / HTTP/1.1\r\n", "http"),
        (b"GET /\r\nHost: twin.example\r\n", "http"),
        (b"GET key\r\n", "tcp"),
        (b"GE\0", "tcp"),
        (b"AMQP\0\0\x09\1", "tcp"),
        (b"GET /" + b"a" * 1000, None),
        (b"\x16\3", None),
        (b"\x16\2", "tcp"),
    ],
)
def test_beginning_is_told_as_soon_as_it_can_be(data: bytes, spoken: str | None) -> None:
    """What cannot become HTTP any more must not wait for a line that never comes."""
    found = look(data)
    assert (found and found.spoken) == spoken


@given(
    st.binary(max_size=4) | st.sampled_from([b"GET", b"A" * 60, b"\r\nPOST", b" X", b"G\t"]),
    st.sampled_from([b" ", b"\t", b"\x0b", b"", b"\0", b"\x1f "]),
    st.binary(max_size=8) | st.just(b"/path"),
    st.sampled_from([b" HTTP/1.1\r\n", b"\thttp/1.0\n", b"\r\n", b"\nGET / HTTP/1.1\r\n"]),
)
def test_what_is_told_of_a_prefix_is_told_of_the_whole(
    method: bytes, blank: bytes, target: bytes, end: bytes
) -> None:
    """Else one says half a line, is taken for no HTTP, and goes on with any host's request."""
    line = method + blank + target + end
    with contextlib.suppress(MalformedError):
        whole = look(line)
        for cut in range(len(line)):
            assert look(line[:cut]) in (None, whole), (line, cut)


def test_beginning_without_end_is_refused() -> None:
    """Memory of the node is not the sandbox's."""
    with pytest.raises(MalformedError):
        look(b"GET /" + b"a" * MOST_BYTES)


@given(st.binary(max_size=400))
def test_any_datagram_is_a_question_or_malformed(data: bytes) -> None:
    """The only exception is the one that says so."""
    with contextlib.suppress(dns.MalformedQueryError):
        dns.parse(data)


def test_answer_that_has_no_room_says_so_and_fits() -> None:
    """By datagram a client asks again by stream; by stream it gets all."""
    name = b"\3web\7example\0"
    plain = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + name + struct.pack("!2H", dns.A, 1)
    many = [ip_address(f"203.0.113.{n}") for n in range(1, 100)]

    query = dns.parse(plain)
    short, long = query.reply(dns.OK, many), query.reply(dns.OK, many, stream=True)

    assert len(short) <= 512
    assert struct.unpack_from("!H", short, 2)[0] & 0x0200
    assert struct.unpack_from("!H", long, 6)[0] == 99
    assert query.name == "web.example"
    assert socket.inet_aton("203.0.113.99") in long
    six = query.reply(dns.OK, [ip_address("2001:db8::1")])
    assert struct.unpack_from("!H", six, 6)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "a b:80",
        "user@web.example:80",
        "[::1",
        "web.example:80:80",
        "1.2.3:80",
        "0x7f.1:80",
        "web.example:",
        "web.example:port",
        "web.example:0",
        "[::1%lo]:80",
        "a_%:1",
    ],
)
def test_authority_that_is_none_is_refused(text: str) -> None:
    """What a proxy understands differently than a server is a way around."""
    with pytest.raises(BadRequestError):
        authority(text, None)


def test_authority_and_absolute_target_are_read() -> None:
    """Controls of the refusals."""
    assert str(authority("WEB.example.:443", None)) == "web.example:443"
    assert authority("[::ffff:10.0.0.1]:80", None).address == ip_address("10.0.0.1")
    assert absolute("http://web.example?q") == (authority("web.example", 80), "/?q")
    head = parse_head(b"GET / HTTP/1.1\r\nHost: web.example\r\nA:\r\n\r\n")
    assert (head.host.name, head.length, head.upgrade) == ("web.example", 0, None)
    for target in ("http://user@web.example/", "https://web.example/", "/path", "http:///x"):
        with pytest.raises(BadRequestError):
            absolute(target)


def test_flood_of_refusals_hides_nothing_that_was_allowed() -> None:
    """Refusals are free for the sandbox; what really left it must stay to be seen."""
    log = EventLog("sb-x-y", kept=10)
    log.add(EgressKind.TCP, EgressDecision.ALLOWED, port=1)
    for port in range(100, 150):
        log.add(EgressKind.UDP, EgressDecision.REFUSED, port=port)
    log.add(EgressKind.TCP, EgressDecision.CLOSED, port=1)

    page = log.read(0, 100)

    assert [event.port for event in page.events] == [1, *range(140, 150), 1]
    assert (page.next_cursor, page.dropped) == (52, 40)


def test_event_ring_drops_the_oldest_and_says_how_many() -> None:
    """A flood of refusals must cost a bounded amount, and must be seen to have been one."""
    log = EventLog("sb-x-y", kept=10)
    for port in range(25):
        log.add(EgressKind.TCP, EgressDecision.REFUSED, port=port)

    page = log.read(3, 4)

    assert [event.port for event in page.events] == [15, 16, 17, 18]
    assert (page.dropped, page.next_cursor) == (12, 19)
    assert log.read(25, 5).events == ()
    assert (log.read(19, 100).next_cursor, log.read(19, 100).dropped) == (25, 0)
    assert type(page).model_validate_json(page.model_dump_json()) == page
