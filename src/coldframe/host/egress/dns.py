"""Answer a sandbox's questions for names: A and AAAA, one question each. Input is hostile."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from coldframe.host.egress.addresses import Address
from coldframe.protocol.network import host_name

A, AAAA, OPT = 1, 28, 41
OK, FORMAT_ERROR, SERVER_FAILURE, NO_NAME, NOT_IMPLEMENTED = 0, 1, 2, 3, 4
TTL_S = 60
_HEADER = struct.Struct("!HHHHHH")
_QUESTION = struct.Struct("!HH")
_RECORD = struct.Struct("!HHHIH")
_INTERNET = 1
_QR, _RD, _RA, _TC = 0x8000, 0x0100, 0x0080, 0x0200
_OPCODE = 0x7800
_PROHIBITED = 18
_PLAIN_SIZE, _OUR_SIZE = 512, 1232
_NAME_POINTER = 0xC00C


class MalformedQueryError(ValueError):
    """It is no question that can be answered; `reply` says so, empty: say nothing."""

    def __init__(self, reply: bytes = b"") -> None:
        super().__init__("malformed question")
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Query:
    """One question."""

    number: int
    flags: int
    question: bytes
    """As it was asked, to be repeated in the answer."""
    name: str
    kind: int
    room: int
    """Bytes that an answer by datagram may have."""
    extended: bool

    def reply(self, code: int, addresses: Sequence[Address] = (), *, stream: bool = False) -> bytes:
        """Encode an answer; one that has no room is cut and says so."""
        width = 4 if self.kind == A else 16
        fitting = [address for address in addresses if len(address.packed) == width]
        tail = _OPTIONS_PROHIBITED if code == NO_NAME else _OPTIONS
        options = tail if self.extended else b""
        flags = _QR | _RA | (self.flags & _RD) | code
        records = [_encode(self.kind, address) for address in fitting]
        room = 65535 if stream else self.room
        used = _HEADER.size + len(self.question) + len(options)
        if used + sum(map(len, records)) > room:
            flags |= _TC
            records = records[: (room - used) // len(records[0])]
        header = _HEADER.pack(self.number, flags, 1, len(records), 0, 1 if options else 0)
        return header + self.question + b"".join(records) + options


_OPTIONS = struct.pack("!BHHIH", 0, OPT, _OUR_SIZE, 0, 0)
_OPTIONS_PROHIBITED = struct.pack("!BHHIHHHH", 0, OPT, _OUR_SIZE, 0, 6, 15, 2, _PROHIBITED)


def _encode(kind: int, address: Address) -> bytes:
    record = _RECORD.pack(_NAME_POINTER, kind, _INTERNET, TTL_S, len(address.packed))
    assert (kind == A) == isinstance(address, IPv4Address)
    return record + address.packed


def parse(data: bytes) -> Query:
    """Read a question.

    Raises:
        MalformedQueryError: it is none, or not one that is answered here.
    """
    if len(data) < _HEADER.size:
        raise MalformedQueryError
    number, flags, questions, answers, authorities, extras = _HEADER.unpack_from(data)
    if flags & _QR:
        raise MalformedQueryError
    if flags & _OPCODE:
        raise MalformedQueryError(_HEADER.pack(number, _QR | NOT_IMPLEMENTED, 0, 0, 0, 0))
    try:
        if questions != 1 or answers or authorities or extras > 1:
            raise ValueError("not one question")
        name, end = _read_name(data, _HEADER.size)
        kind, family = _QUESTION.unpack_from(data, end)
        end += _QUESTION.size
        size = _extended_size(data, end) if extras else None
        if family != _INTERNET:
            raise ValueError("not of the internet")
    except (ValueError, IndexError, struct.error):
        raise MalformedQueryError(_HEADER.pack(number, _QR | FORMAT_ERROR, 0, 0, 0, 0)) from None
    room = _PLAIN_SIZE if size is None else min(max(size, _PLAIN_SIZE), _OUR_SIZE)
    question = data[_HEADER.size : end]
    return Query(number, flags, question, name, kind, room, size is not None)


def _read_name(data: bytes, at: int) -> tuple[str, int]:
    labels = []
    while length := data[at]:
        if length > 63:  # a pointer: nobody asks by one
            raise ValueError("a compressed name")
        label = data[at + 1 : at + 1 + length]
        if len(label) != length:
            raise ValueError("a short name")
        labels.append(label.decode("ascii"))
        at += 1 + length
    return host_name(".".join(labels)), at + 1


def _extended_size(data: bytes, at: int) -> int | None:
    root, kind, size = struct.unpack_from("!BHH", data, at)
    return int(size) if (root, kind) == (0, OPT) else None
