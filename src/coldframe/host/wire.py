"""Frames between the node and a spawner worker, as docs/protocol.md fixes them.

Pure values and bytes: no socket and no event loop. The numbers repeat native/protocol.h; a
test compares the two files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NewType

VERSION: Final = 4
MAX_FRAME: Final = 4 << 20
MAX_DESCRIPTORS: Final = 16


# What every frame is made of are plain numbers, not members of enumerations: to look one up takes
# four times as long, and a command takes thirty of them.

FrameType = NewType("FrameType", int)


class Type:
    """Frame types: requests below 64, answers from 64, events from 96."""

    HELLO: Final = FrameType(1)
    CREATE: Final = FrameType(2)
    EXEC: Final = FrameType(3)
    EXEC_OUTPUT: Final = FrameType(4)
    EXEC_WATCH: Final = FrameType(5)
    EXEC_MARK: Final = FrameType(6)
    SIGNAL: Final = FrameType(7)
    KILL_ALL: Final = FrameType(8)
    DESTROY: Final = FrameType(9)
    REMOVE_TREE: Final = FrameType(10)
    SOCKET: Final = FrameType(11)
    PROCESSES: Final = FrameType(12)
    STAT: Final = FrameType(13)
    MEASURE: Final = FrameType(14)
    EXEC_FORGET: Final = FrameType(15)
    PREPARE: Final = FrameType(16)
    ATTACH: Final = FrameType(17)
    KEEP: Final = FrameType(18)
    DROP: Final = FrameType(19)
    KEPT_LIST: Final = FrameType(20)
    AWAIT: Final = FrameType(21)
    END: Final = FrameType(22)
    OK: Final = FrameType(64)
    CREATED: Final = FrameType(65)
    STARTED: Final = FrameType(66)
    EXEC_END: Final = FrameType(67)
    OUTPUT: Final = FrameType(68)
    PROGRESS: Final = FrameType(69)
    SOCKET_MADE: Final = FrameType(70)
    PROCESS_LIST: Final = FrameType(71)
    KEPT_PAGE: Final = FrameType(72)
    SANDBOX_GONE: Final = FrameType(96)
    ERROR: Final = FrameType(127)


class Tag:
    """Fields. Layouts stand in docs/protocol.md."""

    VERSION: Final = 1
    CGROUP: Final = 3
    LAYERS_FD: Final = 5
    SELF_FD: Final = 6
    SPOOL_FD: Final = 7
    CLIENT_FD: Final = 8
    LISTEN_FD: Final = 9
    SANDBOX: Final = 10
    LAYER: Final = 11
    UPPER_FD: Final = 12
    HOSTNAME: Final = 13
    CREATE_NUMBERS: Final = 14
    INJECT: Final = 15
    PREPARE_NUMBERS: Final = 16
    GRACE: Final = 17
    KEPT: Final = 18
    NOTE: Final = 19
    EXEC_NUMBERS: Final = 20
    ARG: Final = 21
    ENV: Final = 22
    CWD: Final = 23
    GROUP: Final = 24
    STDIN_FD: Final = 25
    STATUS_FD: Final = 26
    EXEC_ID: Final = 27
    SEEN: Final = 28
    SIGNAL_NUMBERS: Final = 29
    DIRECTORY_FD: Final = 30
    NAME: Final = 31
    SOCKET_NUMBERS: Final = 32
    COUNT: Final = 33
    PATH: Final = 34
    KEEP_FD: Final = 35
    EXPIRES: Final = 36
    AFTER: Final = 37
    CREATED_NUMBERS: Final = 40
    ROOT_FD: Final = 41
    PIDFD: Final = 42
    STARTED_NUMBERS: Final = 43
    PTY_FD: Final = 44
    END_NUMBERS: Final = 45
    STDOUT_DATA: Final = 46
    STDERR_DATA: Final = 47
    STDOUT_FD: Final = 48
    STDERR_FD: Final = 49
    LEFTOVER: Final = 50
    PROGRESS_NUMBERS: Final = 51
    PROCESS: Final = 52
    NUMBER: Final = 53
    DURATIONS: Final = 54
    MADE_FD: Final = 56
    SPOOL_ERRNO: Final = 57
    LOST: Final = 58
    KEPT_NUMBERS: Final = 59
    ERRNO: Final = 60
    STAGE: Final = 61
    MESSAGE: Final = 62
    GONE_NUMBERS: Final = 70


class CreateFlag:
    """Flags of CREATE."""

    NO_NEW_PRIVS: Final = 1


class ExecFlag:
    """Flags of EXEC."""

    MERGE_STDERR: Final = 1
    STARTED: Final = 2
    PTY: Final = 4
    OUT_OF_REACH: Final = 8


class ProgressFlag:
    """Flags of PROGRESS and OUTPUT."""

    STDOUT_EOF: Final = 1
    STDERR_EOF: Final = 2
    ENDED: Final = 4


class Scope(IntEnum):
    """Whom SIGNAL reaches."""

    LEADER = 1
    GROUP = 2
    TREE = 3
    CHILDREN = 4


class Reason(IntEnum):
    """Why an exec ended."""

    EXIT = 1
    SIGNAL = 2
    DEADLINE = 3
    OOM = 4
    OUTPUT_LIMIT = 5
    SANDBOX_GONE = 6
    INFRASTRUCTURE = 7


class GoneCause(IntEnum):
    """Why a sandbox ended by itself."""

    OOM = 1
    SIGNAL = 2
    EXIT = 3


class KeptState(IntEnum):
    """What has become of that which something is kept with."""

    PLAIN = 0
    STARTING = 1
    LIVE = 2
    GONE = 3
    ABSENT = 4
    RUNNING = 5
    ENDED = 6


HEADER: Final = struct.Struct(">IHHQ")
FIELD: Final = struct.Struct(">HI")
U32: Final = struct.Struct(">I")
U64: Final = struct.Struct(">Q")
U64_PAIR: Final = struct.Struct(">QQ")
CREATE_NUMBERS: Final = struct.Struct(">7Q")
EXEC_NUMBERS: Final = struct.Struct(">11Q")
CREATED_NUMBERS: Final = struct.Struct(">8Q")
END_NUMBERS: Final = struct.Struct(">13Q32s32s")
PROGRESS_NUMBERS: Final = struct.Struct(">4Q")
PROCESS_NUMBERS: Final = struct.Struct(">3Q")
KEPT_NUMBERS: Final = struct.Struct(">5Q")

_HEADER_REST = HEADER.size - 4

Field = tuple[int, bytes]
"""To be sent."""
Fields = list[tuple[int, memoryview]]
"""As they came."""


class ProtocolError(Exception):
    """The peer sent what no frame can be; the connection is of no more use."""


def encode(
    frame_type: int, request_id: int, fields: list[tuple[int, bytes]], descriptors: int = 0
) -> bytes:
    """Return one frame.

    Raises:
        ValueError: the frame would be longer than MAX_FRAME, or carry too many descriptors.
    """
    parts = [b""]
    pack = FIELD.pack
    length = _HEADER_REST
    for tag, value in fields:
        size = len(value)
        parts.append(pack(tag, size))
        parts.append(value)
        length += 6 + size
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes; at most {MAX_FRAME} fit")
    if descriptors > MAX_DESCRIPTORS:
        raise ValueError(f"{descriptors} descriptors in one frame; at most {MAX_DESCRIPTORS} fit")
    parts[0] = HEADER.pack(length, frame_type, descriptors, request_id)
    return b"".join(parts)


def decode_fields(body: memoryview) -> Fields:
    """Split what follows a header into (tag, value) pairs, in order.

    Raises:
        ProtocolError: a field ends behind the frame.
    """
    fields: Fields = []
    unpack = FIELD.unpack_from
    at, end = 0, len(body)
    while at < end:
        if end - at < 6:
            raise ProtocolError("a field header is cut")
        tag, size = unpack(body, at)
        at += 6
        if size > end - at:
            raise ProtocolError(f"field {tag} of {size} bytes is cut")
        fields.append((tag, body[at : at + size]))
        at += size
    return fields


class Splitter:
    """Cut a byte stream into frames, however it arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, memoryview]]:
        """Yield (type, descriptors, request id, body) of every frame that is complete.

        Raises:
            ProtocolError: a length that no frame can have.
        """
        if self._rest:
            data = self._rest + data
        view = memoryview(data)
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            length, frame_type, descriptors, request_id = HEADER.unpack_from(data, at)
            if not _HEADER_REST <= length <= MAX_FRAME or descriptors > MAX_DESCRIPTORS:
                raise ProtocolError(f"frame of {length} bytes with {descriptors} descriptors")
            if end - at < 4 + length:
                break
            body = view[at + HEADER.size : at + 4 + length]
            at += 4 + length
            yield frame_type, descriptors, request_id, body
        self._rest = data[at:]


def spool_pieces(spool_bytes: int, start: int, end: int) -> list[tuple[int, int]]:
    """Where stream bytes [start, end) lie in a spool file: (file offset, length) in order.

    Says nothing of whether they were overwritten since; see `spool_oldest`.
    """
    head = spool_bytes // 2
    ring = spool_bytes - head
    pieces: list[tuple[int, int]] = []
    at = start
    while at < end:
        if at < head:
            offset, room = at, head - at
        else:
            turn = (at - head) % ring
            offset, room = head + turn, ring - turn
        size = min(room, end - at)
        pieces.append((offset, size))
        at += size
    return pieces


def spool_oldest(spool_bytes: int, total: int) -> int:
    """The first offset behind the head that a ring of `total` bytes written still holds."""
    head = spool_bytes // 2
    return max(head, total - (spool_bytes - head))
