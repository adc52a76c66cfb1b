"""Steer connections to a listener whatever their destination: a BPF sk_lookup program.

The kernel (5.9 and later, no module) asks it which listener takes a new connection in a
network namespace. Loopback and the namespace's own addresses are left alone. Without NAT: the
accepted socket's own address is the destination that was meant, and nothing is tracked.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import socket
import struct
from ipaddress import IPv4Address, IPv6Address

from coldframe.host.syscalls import address_of

_BPF_CALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280}
_MAP_CREATE, _MAP_UPDATE, _PROG_LOAD, _LINK_CREATE = 0, 2, 5, 28
_SOCKMAP, _SK_LOOKUP_PROGRAM, _SK_LOOKUP = 15, 30, 36
_LOOKUP_ELEMENT, _ASSIGN, _RELEASE = 1, 124, 86
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# Offsets in struct bpf_sk_lookup.
_FAMILY, _PROTOCOL, _LOCAL4, _LOCAL6 = 8, 12, 40, 44
_V4, _V6, _UDP4, _UDP6 = range(4)
_SLOTS = 4
_TABLE = 0x7AB1E000


class Steering:
    """Sends every new connection but local ones to a listener, until it is closed."""

    def __init__(self, own: tuple[IPv4Address, IPv6Address]) -> None:
        """Load the program.

        Args:
            own: addresses that are left alone, beside loopback's.
        Raises:
            OSError: the kernel has no sk_lookup or does not let us load it.
        """
        self._link = self._program = -1
        self._table = _bpf(_MAP_CREATE, struct.pack("=IIII", _SOCKMAP, 4, 8, _SLOTS))
        try:
            self._program = _load(_program(*own).replace(_word_of(_TABLE), _word_of(self._table)))
        except BaseException:
            self.close()
            raise

    def attach(self, network: int, listeners: dict[tuple[int, int], socket.socket]) -> None:
        """Begin to steer in the namespace of a descriptor.

        `listeners` are by (family, socket kind); what has none is left to the kernel.
        Raises OSError.
        """
        for (family, kind), listener in listeners.items():
            _put(self._table, _slot(family, kind), listener.fileno())
        attributes = struct.pack("=IIII", self._program, network, _SK_LOOKUP, 0)
        self._link = _bpf(_LINK_CREATE, attributes)
        # The link holds the program, and that the table.
        self._table, self._program = _close(self._table), _close(self._program)

    def close(self) -> None:
        """Stop; the kernel has nothing of it afterwards. Twice is fine."""
        self._link = _close(self._link)
        self._program = _close(self._program)
        self._table = _close(self._table)


def _close(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


def refusal() -> str | None:
    """Say why this kernel cannot steer connections; None: it can."""
    try:
        Steering((IPv4Address(0), IPv6Address(0))).close()
    except OSError as error:
        return (
            f"the kernel cannot steer connections: {error}; egress needs Linux 5.9 or later with "
            "CONFIG_BPF_SYSCALL, and CAP_BPF and CAP_NET_ADMIN"
        )
    return None


def _slot(family: int, kind: int) -> int:
    slots = {
        (socket.AF_INET, socket.SOCK_STREAM): _V4,
        (socket.AF_INET6, socket.SOCK_STREAM): _V6,
        (socket.AF_INET, socket.SOCK_DGRAM): _UDP4,
        (socket.AF_INET6, socket.SOCK_DGRAM): _UDP6,
    }
    return slots[socket.AddressFamily(family), socket.SocketKind(kind)]


def _bpf(command: int, attributes: bytes) -> int:
    number = _BPF_CALL.get(platform.machine())
    if number is None:
        raise OSError(38, f"no bpf on {platform.machine()}")
    told = bytearray(attributes.ljust(128, b"\0"))
    result = int(_libc.syscall(number, command, address_of(told), len(told)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"bpf({command})")
    return result


def _put(table: int, slot: int, fd: int) -> None:
    key, value = bytearray(struct.pack("=I", slot)), bytearray(struct.pack("=Q", fd))
    pointers = (address_of(key).value, address_of(value).value)
    _bpf(_MAP_UPDATE, struct.pack("=IIQQQ", table, 0, *pointers, 0))


def _load(code: bytes) -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_text = ctypes.create_string_buffer(b"Apache-2.0\0")
    attributes = struct.pack(
        "=IIQQIIQII16sII",
        _SK_LOOKUP_PROGRAM,
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(license_text),
        0,
        0,
        0,
        0,
        0,
        b"coldframe_steer",
        0,
        _SK_LOOKUP,
    )
    return _bpf(_PROG_LOAD, attributes)


# --- the program ----------------------------------------------------------------------


class _Code:
    """Instructions with forward jumps to labels."""

    def __init__(self) -> None:
        self._code: list[list[int]] = []
        self._labels: dict[str, int] = {}
        self._jumps: dict[int, str] = {}

    def emit(self, op: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> None:
        self._code.append([op, dst | src << 4, off, imm & 0xFFFFFFFF])

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def load(self, register: int, offset: int) -> None:
        """register = 32 bits of the context (in r6)."""
        self.emit(0x61, register, 6, offset)

    def move(self, register: int, value: int) -> None:
        self.emit(0xB7, register, imm=value)

    def jump(self, label: str) -> None:
        self._jumps[len(self._code)] = label
        self.emit(0x05)

    def jump_if(self, register: int, value: int, label: str, *, equal: bool = True) -> None:
        """Compare 32 bits."""
        self._jumps[len(self._code)] = label
        self.emit(0x16 if equal else 0x56, register, imm=value)

    def call(self, function: int) -> None:
        self.emit(0x85, imm=function)

    def assemble(self) -> bytes:
        for at, label in self._jumps.items():
            self._code[at][2] = self._labels[label] - at - 1
        return b"".join(struct.pack("=BBhI", *line) for line in self._code)


@functools.cache
def _program(own4: IPv4Address, own6: IPv6Address) -> bytes:
    """The program, with _TABLE where the number of its table belongs."""
    code = _Code()
    code.emit(0xBF, 6, 1)  # r6 = context
    code.load(2, _FAMILY)
    code.load(3, _PROTOCOL)
    code.move(7, _V4)
    code.jump_if(3, socket.IPPROTO_TCP, "transport")
    code.jump_if(3, socket.IPPROTO_UDP, "pass", equal=False)
    code.move(7, _UDP4)
    code.label("transport")
    code.jump_if(2, socket.AF_INET6, "six")
    _leave_local4(code, own4)
    code.jump("steer")
    code.label("six")
    code.emit(0x07, 7, imm=1)  # r7 += 1
    for number, address in enumerate((IPv6Address("::1"), own6)):
        _leave_local6(code, address, f"other{number}")
    code.label("steer")
    _assign(code)
    code.label("pass")
    code.move(0, 1)
    code.emit(0x95)
    return code.assemble()


def _leave_local4(code: _Code, own: IPv4Address) -> None:
    code.load(4, _LOCAL4)
    code.jump_if(4, _word(own.packed), "pass")
    code.emit(0x54, 4, imm=_word(b"\xff\0\0\0"))  # 127/8, in the order of the network
    code.jump_if(4, _word(b"\x7f\0\0\0"), "pass")


def _leave_local6(code: _Code, address: IPv6Address, otherwise: str) -> None:
    for part in range(4):
        code.load(4, _LOCAL6 + 4 * part)
        word = _word(address.packed[4 * part : 4 * part + 4])
        code.jump_if(4, word, otherwise, equal=False)
    code.jump("pass")
    code.label(otherwise)


def _assign(code: _Code) -> None:
    """The listener of slot r7 takes the connection, if there is one."""
    code.emit(0x63, 10, 7, -4)  # *(u32 *)(r10 - 4) = r7
    code.emit(0x18, 1, 1, imm=_TABLE)  # r1 = the map, by its descriptor
    code.emit(0x00)
    code.emit(0xBF, 2, 10)
    code.emit(0x07, 2, imm=-4)
    code.call(_LOOKUP_ELEMENT)
    code._jumps[len(code._code)] = "pass"
    code.emit(0x15, 0)  # if r0 == 0 (64 bits)
    code.emit(0xBF, 7, 0)
    code.emit(0xBF, 1, 6)
    code.emit(0xBF, 2, 7)
    code.move(3, 0)
    code.call(_ASSIGN)
    code.emit(0xBF, 1, 7)
    code.call(_RELEASE)


def _word_of(number: int) -> bytes:
    return struct.pack("=I", number)


def _word(octets: bytes) -> int:
    (value,) = struct.unpack("=I", octets)
    return int(value)
