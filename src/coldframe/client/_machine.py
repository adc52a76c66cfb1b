"""Join the machine's node, and start it if there is none.

Any number of processes may do so at once, while a node is killed or leaves: who starts one holds a
lock of the home until it is up, and everybody else tries to join meanwhile. A node that was started
so is a process of its own session; it outlives us, and leaves when nobody has used it for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING

import coldframe
from coldframe.client._connection import Address
from coldframe.protocol import places
from coldframe.protocol.errors import (
    CapabilityError,
    InvalidRequestError,
    ServiceUnreachableError,
    VersionMismatchError,
)

if TYPE_CHECKING:
    from coldframe.client._remote import RemoteNode

IDLE_EXIT_S = 300.0
"""After how long without sandboxes and clients a node that was started so leaves."""
_START_S = 90.0
"""How long a node may take to come, one that is just leaving included."""
_LOOK_S = 0.025
_LOG_BYTES = 16 << 20
_ELSE = "or set COLDFRAME_URL to a service, or COLDFRAME_URL=in-process to run a node in this one"

_PASSED = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "XDG_CONFIG_HOME"),
    *("PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
})  # fmt: skip
_PASSED_PREFIXES = ("COLDFRAME_", "LC_", "PIP_", "NPM_CONFIG_", "npm_config_")
_WITHHELD = frozenset({"COLDFRAME_URL", "COLDFRAME_API_KEY"})


class Machine:
    """The machine's node of one home, as this process reaches it."""

    def __init__(self, home: Path, runtime: str | None, environment: Mapping[str, str]) -> None:
        """Say whose node.

        Args:
            home: each home has one node.
            runtime: what it must run with; None: whatever it runs with.
            environment: this process's own; what a started node needs of it is passed on.
        """
        self._home, self._runtime, self._environment = home, runtime, environment
        self._address = Address("localhost", unix=places.socket_of(home))

    async def join(self) -> RemoteNode:
        """Return a link to the node, which is started if there is none.

        When the node is killed later, the link starts it again.

        Raises:
            CapabilityError: there is none, and none could be started; the message says why.
            NotPermittedError: it is another user's.
            VersionMismatchError, InvalidRequestError: one runs, of another version or runtime.
        """
        link = await self._joined()
        runs = link.capabilities().runtime
        if self._runtime is None or self._runtime == runs:
            link.stay(self._revive)
            return link
        await link.close()
        raise InvalidRequestError(
            f"the node of {self._home} runs with the runtime {runs!r}, not {self._runtime!r}; "
            "stop it with coldframe node stop, use another home, or say in_process=True"
        )

    async def _revive(self) -> None:
        await (await self._joined()).close()

    async def _joined(self) -> RemoteNode:
        deadline = monotonic() + _START_S
        while (link := await self._try_to_join()) is None:
            with _start_lock(self._home) as held:
                if held:
                    return await self._join_or_start(deadline)
            if monotonic() > deadline:
                raise CapabilityError(
                    f"another process has been starting the node of {self._home} for "
                    f"{_START_S:g} s; see {places.log_of(self._home)}"
                )
            await asyncio.sleep(_LOOK_S)
        return link

    async def _join_or_start(self, deadline: float) -> RemoteNode:
        """Under the lock: whoever held it before us may have started one already."""
        link = await self._try_to_join()
        if link is not None:
            return link
        with _log(self._home) as log:
            begun = log.tell()
            process = self._spawn(log)
        # A child that has ended stays in the process table until somebody waits for it.
        threading.Thread(target=process.wait, name="coldframe-node", daemon=True).start()
        while monotonic() < deadline:
            ended = process.returncode is not None
            link = await self._try_to_join()
            if link is not None:
                return link
            if ended:
                raise CapabilityError(
                    f"the node of {self._home} could not be started: "
                    f"{_last_words(self._home, begun)}; {_ELSE}"
                )
            await asyncio.sleep(_LOOK_S)
        process.terminate()
        raise CapabilityError(
            f"the node of {self._home} was not there within {_START_S:g} s; see "
            f"{places.log_of(self._home)}"
        )

    async def _try_to_join(self) -> RemoteNode | None:
        """Return None if nobody is there, or who is there is just leaving."""
        from coldframe.client._remote import RemoteNode

        try:
            return await RemoteNode.open_once(self._address)
        except ServiceUnreachableError:
            return None
        except VersionMismatchError as error:
            raise VersionMismatchError(
                f"the node of {self._home} is of another version of Coldframe: {error}; have it "
                f"replaced with coldframe node upgrade, {_ELSE}"
            ) from error

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        passed = {
            name: value
            for name, value in self._environment.items()
            if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and name not in _WITHHELD
        }
        passed["COLDFRAME_HOME"] = str(self._home)
        if self._runtime is not None:
            passed["COLDFRAME_RUNTIME"] = self._runtime
        # It starts in another directory, and must be what we are.
        paths = [
            str(Path(coldframe.__path__[0]).parent),
            *passed.get("PYTHONPATH", "").split(os.pathsep),
        ]
        passed["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths if path)
        idle_s = self._environment.get("COLDFRAME_IDLE_EXIT_S") or f"{IDLE_EXIT_S:g}"
        command = [sys.executable, "-P", "-m", "coldframe.cli.main", "serve"]
        try:
            return subprocess.Popen(
                [*command, "--idle-exit", idle_s],
                cwd="/",
                env=passed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o022,
            )
        except OSError as error:
            raise CapabilityError(
                f"the node of {self._home} could not be started: {sys.executable or 'Python'}: "
                f"{error.strerror}; start it with coldframe serve, {_ELSE}"
            ) from error


@contextlib.contextmanager
def _start_lock(home: Path) -> Iterator[bool]:
    """Yield whether it is ours to start the node; it is nobody else's meanwhile."""
    path = places.start_lock_of(home)
    try:
        home.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


@contextlib.contextmanager
def _log(home: Path) -> Iterator[IO[bytes]]:
    path = places.log_of(home)
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > _LOG_BYTES:
                path.rename(path.with_suffix(".log.1"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _cannot_write(path, error) from error
    with os.fdopen(fd, "ab") as log:
        log.seek(0, os.SEEK_END)
        yield log


def _cannot_write(path: Path, error: OSError) -> CapabilityError:
    root = "run this as root, " if isinstance(error, PermissionError) else ""
    return CapabilityError(
        f"there is no node here, and none can be started: {path}: {error.strerror}; {root}set "
        f"COLDFRAME_HOME to a directory that can be written, {_ELSE}"
    )


def _last_words(home: Path, begun: int) -> str:
    """Return why a node did not come: its last message, or where to look."""
    path = places.log_of(home)
    with path.open("rb") as log:
        log.seek(begun)
        lines = log.read(1 << 16).decode("utf-8", "replace").splitlines()
    said = [line.removeprefix("coldframe: ") for line in lines if line.startswith("coldframe: ")]
    return said[-1].rstrip(".") if said else f"see {path}"
