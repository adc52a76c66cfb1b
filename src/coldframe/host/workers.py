"""Start a worker of the spawner, or find one that outlived its daemon.

One that is to outlive this process listens on a socket of its own in a directory of the node's;
there the next daemon connects to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from coldframe.host import answers, wire
from coldframe.host.descriptors import close_all
from coldframe.host.link import Link
from coldframe.host.outcome import Outcome
from coldframe.host.spawner_types import SpawnerConfig, SpawnerFault
from coldframe.host.wire import Field, Fields, Tag, Type
from coldframe.host.worker import Worker
from coldframe.protocol.errors import CapabilityError, SpawnerLostError, VersionMismatchError

OnEvent = Callable[[int, Fields, list[int]], None]
OnLost = Callable[[Worker, str], None]

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_ATTACH_S = 30.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def sealed_program(binary: Path | None) -> tuple[int, str]:
    """A sealed memfd with the native program, and its digest.

    What runs cannot be written from a sandbox.
    """
    source = binary or Path(str(resources.files("coldframe") / "_native" / "coldframe-native"))
    try:
        content = source.read_bytes()
    except FileNotFoundError as error:
        raise CapabilityError(
            f"{source} is missing: build it with `make -C native` or `pip install -e .`"
        ) from error
    fd = os.memfd_create("coldframe-native", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        # Executable but not readable: then the kernel makes whatever runs from it undumpable.
        os.fchmod(fd, 0o111)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, hashlib.sha256(content).hexdigest()


# --- starting -------------------------------------------------------------------------


def launch(program: int, on_event: OnEvent, on_lost: OnLost, *, first_id: int) -> Worker:
    """Start a worker from a sealed program; it waits to be greeted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [f"/proc/self/fd/{program}", "spawner", "--fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(program, theirs.fileno()),
            start_new_session=True,
            cwd="/",
            env={},
        )
    worker = _connected(ours, on_event, on_lost, first_id)
    worker.pid, worker.pidfd = process.pid, os.pidfd_open(process.pid)
    process.returncode = 0  # it is waited for by its pidfd
    return worker


def _connected(sock: socket.socket, on_event: OnEvent, on_lost: OnLost, first_id: int) -> Worker:
    worker: Worker | None = None

    def lost(reason: str) -> None:
        if worker is not None:
            on_lost(worker, reason)

    worker = Worker(0, -1, Link(sock, on_event, lost, first_id))
    return worker


async def greet(worker: Worker, config: SpawnerConfig, init: int) -> None:
    """Tell a new worker what it works for.

    Args:
        init: descriptor of the program that pid 1 of each sandbox runs.
    Raises:
        CapabilityError: the kernel refuses what it needs.
    """
    client = os.pidfd_open(os.getpid())
    descriptors = [os.open(path, _DIRECTORY) for path in (config.layers, config.spool)]
    descriptors += [os.dup(init), client]
    fields: list[Field] = [
        (Tag.VERSION, wire.U64.pack(wire.VERSION)),
        (Tag.LAYERS_FD, wire.U32.pack(0)),
        (Tag.SPOOL_FD, wire.U32.pack(1)),
        (Tag.SELF_FD, wire.U32.pack(2)),
        # A forked child may hold our end of the socket longer than we live.
        (Tag.CLIENT_FD, wire.U32.pack(3)),
    ]
    fields += [
        (Tag.CGROUP, name.encode() + b"=" + os.fsencode(path))
        for name, path in config.cgroups.items()
    ]
    try:
        if config.sockets is not None:
            fields.append((Tag.GRACE, wire.U64.pack(int(config.grace_s * 1e9))))
            fields.append((Tag.LISTEN_FD, wire.U32.pack(len(descriptors))))
            descriptors.append(_listen(config.sockets))
        asked: Outcome[None] = Outcome()
        answer = answers.Answer(asked, answers.decode_nothing)
        worker.link.request(Type.HELLO, fields, answer, descriptors)
        await asked
    except SpawnerFault as fault:
        raise CapabilityError(f"the native spawner cannot work here: {fault}") from fault
    except (SpawnerLostError, ConnectionError) as lost:
        raise CapabilityError("the native spawner ended before it answered") from lost
    finally:
        close_all(descriptors)


@contextlib.contextmanager
def _reached(directory: Path) -> Iterator[str]:
    """A path to a directory that is short enough for a socket's address, for a block."""
    fd = os.open(directory, _DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _listen(directory: Path) -> int:
    with _reached(directory) as near:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with listener:
            listener.bind(f"{near}/{time.monotonic_ns()}.sock")
            listener.listen(4)
            return listener.detach()


# --- finding --------------------------------------------------------------------------


def connect_all(directory: Path) -> tuple[list[socket.socket], int]:
    """Connect to every worker that listens in a directory; return how many have gone, too.

    The sockets of those are removed.
    """
    found: list[socket.socket] = []
    gone = 0
    if not directory.is_dir():
        return found, gone
    with _reached(directory) as near:
        for path in sorted(directory.glob("*.sock")):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(f"{near}/{path.name}")
            except OSError:
                sock.close()
                path.unlink(missing_ok=True)
                gone += 1
            else:
                found.append(sock)
    return found, gone


async def attach(
    sock: socket.socket, on_event: OnEvent, on_lost: OnLost, *, first_id: int
) -> Worker | None:
    """Take over a worker that has outlived its daemon; None: it is ending.

    Raises:
        VersionMismatchError: it speaks another protocol.
        CapabilityError: it does not answer.
    """
    client = os.pidfd_open(os.getpid())
    worker = _connected(sock, on_event, on_lost, first_id)
    asked: Outcome[tuple[int, int]] = Outcome()
    answer = answers.Answer(asked, answers.decode_worker)
    try:
        fields: list[Field] = [(Tag.CLIENT_FD, wire.U32.pack(0))]
        worker.link.request(Type.ATTACH, fields, answer, [client])
        async with asyncio.timeout(_ATTACH_S):
            version, worker.pid = await asked
        worker.pidfd = os.pidfd_open(worker.pid)
    except TimeoutError as error:
        worker.lost = True
        worker.link.close("it does not answer")
        raise CapabilityError(
            "a spawner that keeps this node's sandboxes does not answer: perhaps another process "
            "is connected to it; try again, or end everything with coldframe gc --all"
        ) from error
    except (SpawnerFault, SpawnerLostError, OSError):
        worker.lost = True
        worker.link.close("it cannot be taken over")
        return None
    finally:
        os.close(client)
    if version != wire.VERSION:
        worker.lost = True
        worker.link.close("it speaks another protocol")
        raise VersionMismatchError(
            f"the spawner (process {worker.pid}) that keeps this node's sandboxes speaks protocol "
            f"{version}, this Coldframe speaks {wire.VERSION}: serve with the version that started "
            "it until they have ended, or end them with coldframe gc --all"
        )
    return worker
