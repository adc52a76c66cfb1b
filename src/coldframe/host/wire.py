"""Frames between the node and a spawner worker, as docs/protocol.md fixes them.

Pure values and bytes: no socket and no event loop. The numbers repeat native/protocol.h; a
test compares the two files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

VERSION: Final = 3
MAX_FRAME: Final = 4 << 20
MAX_DESCRIPTORS: Final = 16


class Type(IntEnum):
    """Frame types: requests below 64, answers from 64, events from 96."""

    HELLO = 1
    CREATE = 2
    EXEC = 3
    EXEC_OUTPUT = 4
    EXEC_WATCH = 5
    EXEC_MARK = 6
    SIGNAL = 7
    KILL_ALL = 8
    DESTROY = 9
    REMOVE_TREE = 10
    SOCKET = 11
    PROCESSES = 12
    STAT = 13
    MEASURE = 14
    EXEC_FORGET = 15
    PREPARE = 16
    ATTACH = 17
    KEEP = 18
    DROP = 19
    KEPT_LIST = 20
    AWAIT = 21
    END = 22
    OK = 64
    CREATED = 65
    STARTED = 66
    EXEC_END = 67
    OUTPUT = 68
    PROGRESS = 69
    SOCKET_MADE = 70
    PROCESS_LIST = 71
    KEPT_PAGE = 72
    SANDBOX_GONE = 96
    ERROR = 127


class Tag(IntEnum):
    """Fields. Layouts stand in docs/protocol.md."""

    VERSION = 1
    NODE_ID = 2
    CGROUP = 3
    LAYERS_FD = 5
    SELF_FD = 6
    SPOOL_FD = 7
    CLIENT_FD = 8
    LISTEN_FD = 9
    SANDBOX = 10
    LAYER = 11
    UPPER_FD = 12
    HOSTNAME = 13
    CREATE_NUMBERS = 14
    INJECT = 15
    PREPARE_NUMBERS = 16
    GRACE = 17
    KEPT = 18
    NOTE = 19
    EXEC_NUMBERS = 20
    ARG = 21
    ENV = 22
    CWD = 23
    GROUP = 24
    STDIN_FD = 25
    EXTRA_FD = 26
    EXEC_ID = 27
    SEEN = 28
    SIGNAL_NUMBERS = 29
    DIRECTORY_FD = 30
    NAME = 31
    SOCKET_NUMBERS = 32
    COUNT = 33
    PATH = 34
    KEEP_FD = 35
    EXPIRES = 36
    AFTER = 37
    CREATED_NUMBERS = 40
    ROOT_FD = 41
    PIDFD = 42
    STARTED_NUMBERS = 43
    PTY_FD = 44
    END_NUMBERS = 45
    STDOUT_DATA = 46
    STDERR_DATA = 47
    STDOUT_FD = 48
    STDERR_FD = 49
    LEFTOVER = 50
    PROGRESS_NUMBERS = 51
    PROCESS = 52
    NUMBER = 53
    DURATIONS = 54
    FEATURE = 55
    MADE_FD = 56
    SPOOL_ERRNO = 57
    LOST = 58
    KEPT_NUMBERS = 59
    ERRNO = 60
    STAGE = 61
    MESSAGE = 62
    GONE_NUMBERS = 70


class CreateFlag(IntEnum):
    """Flags of CREATE."""

    NO_NEW_PRIVS = 1


class ExecFlag(IntEnum):
    """Flags of EXEC."""

    NO_NEW_PRIVS = 1
    MERGE_STDERR = 2
    STARTED = 4
    PTY = 8
    OUT_OF_REACH = 16


class ProgressFlag(IntEnum):
    """Flags of PROGRESS and OUTPUT."""

    STDOUT_EOF = 1
    STDERR_EOF = 2
    ENDED = 4


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
U32_PAIR: Final = struct.Struct(">II")
U64_PAIR: Final = struct.Struct(">QQ")
CREATE_NUMBERS: Final = struct.Struct(">7Q")
EXEC_NUMBERS: Final = struct.Struct(">11Q")
CREATED_NUMBERS: Final = struct.Struct(">9Q")
END_NUMBERS: Final = struct.Struct(">14Q32s32s")
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
