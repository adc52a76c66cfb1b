"""A runtime without isolation: a directory per sandbox, host processes in it.

For tests, and for machines without root. Commands are the host's own programs, started with
their working directory mapped into the sandbox's directory; only the file API and the working
directory know that directory as `/`, absolute paths in a command are the host's. It keeps no
hostile command from anything, and says so in its capabilities. Every command's process tree is
still ended as a whole (see `fake_zygote.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import marshal
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from coldframe.host.fsthreads import FileThreads
from coldframe.images.base import Image, ImageConfig
from coldframe.protocol.errors import (
    CapabilityError,
    CreateError,
    SandboxGoneError,
)
from coldframe.protocol.models import (
    Capabilities,
    SandboxSpec,
)
from coldframe.runtimes import fake_zygote
from coldframe.runtimes.base import SandboxHandle
from coldframe.runtimes.fake_exec import process_name
from coldframe.runtimes.fake_request import DEFAULT_PATH, require_plannable
from coldframe.runtimes.fake_sandbox import FakeSandbox, require_no_egress

__all__ = ["FakeImages", "FakeRuntime", "FakeSandbox", "die"]

_LEAK_GRACE_S = 1.0


class FakeImages:
    """Answers any name with an empty image: the fake runtime brings no files of one."""

    def resolve(self, name: str) -> Image:
        """Return an image whose digest is that of its name."""
        digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
        return Image(name, digest, (), ImageConfig(env=(("PATH", DEFAULT_PATH),)))


async def die(sandbox: SandboxHandle) -> None:
    """End a sandbox of the fake runtime as if its pid 1 had been killed."""
    assert isinstance(sandbox, FakeSandbox)
    sandbox.die("signal 9")


class FakeRuntime:
    """See `Runtime`. Sandboxes live below `base`, by default the system's temporary directory."""

    sandbox_class: type[FakeSandbox] = FakeSandbox
    """Tests of the rooms above put one that fails in its place."""

    def __init__(self, base: Path | None = None) -> None:
        self._given_base = base
        self._made_base: Path | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._sandboxes: dict[str, FakeSandbox] = {}

    @property
    def name(self) -> str:
        """`fake`."""
        return "fake"

    @property
    def base(self) -> Path:
        """The directory that holds the sandboxes' directories."""
        assert self._made_base is not None
        return self._made_base

    async def start(self) -> None:
        """See `Runtime.start`."""
        if self._channel is not None:
            return
        self.threads = FileThreads()
        if self._given_base is not None:
            self._given_base.mkdir(parents=True, exist_ok=True)
        self._made_base = Path(tempfile.mkdtemp(prefix="coldframe-fake-", dir=self._given_base))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._zygote = subprocess.Popen(  # noqa: ASYNC220 (starts in milliseconds)
                [
                    sys.executable,
                    "-I",
                    "-S",
                    fake_zygote.__file__,
                    str(theirs.fileno()),
                    str(self._made_base),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._zygote_lost)

    def _zygote_lost(self) -> None:
        assert self._channel is not None
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        for sandbox in self._sandboxes.values():
            sandbox.die("spawner lost")

    async def close(self) -> None:
        """See `Runtime.close`."""
        channel, self._channel = self._channel, None
        if channel is None or self._zygote is None:
            return
        await asyncio.gather(*(s.destroy() for s in list(self._sandboxes.values())))
        asyncio.get_running_loop().remove_reader(channel.fileno())
        channel.close()
        await asyncio.to_thread(self._zygote.wait)
        await asyncio.to_thread(self.threads.close)
        await asyncio.to_thread(shutil.rmtree, self.base, ignore_errors=True)

    def capabilities(self) -> Capabilities:
        """See `Runtime.capabilities`."""
        return Capabilities(
            runtime=self.name,
            isolation=False,
            pty=True,
            ports=True,
            storage="directory",
            details={"network": "the host's", "processes": "the host's", "root": "cwd only"},
        )

    def require(self, spec: SandboxSpec, image: Image) -> None:
        """See `Runtime.require`."""
        if spec.disk_bytes is not None:
            raise CapabilityError(
                "the fake runtime cannot limit disk_bytes; use the native runtime"
            )
        require_no_egress(spec.network)
        require_plannable(image, spec)

    async def create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> FakeSandbox:
        """See `Runtime.create`."""
        if self._channel is None:
            raise CreateError("the fake runtime has not been started")
        self.require(spec, image)
        if sandbox_id in self._sandboxes:
            raise CreateError(f"sandbox {sandbox_id!r} exists already")
        sandbox = self.sandbox_class(self, sandbox_id, spec, image)
        try:
            sandbox.make_tree()
            sandbox.open_tree()
        except BaseException as error:
            shutil.rmtree(sandbox.directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise CreateError(f"could not make {sandbox.directory}: {error}") from error
            raise
        self._sandboxes[sandbox_id] = sandbox
        return sandbox

    def forget(self, sandbox_id: str) -> None:
        """Drop a sandbox that has been destroyed."""
        self._sandboxes.pop(sandbox_id, None)

    def launch(
        self,
        argv: Sequence[bytes],
        env: Mapping[bytes, bytes],
        paths: Sequence[bytes],
        cwd: int,
        streams: tuple[int, ...],
        *,
        pty: bool,
    ) -> socket.socket:
        """Hand a command to the zygote; return our end of its status channel."""
        if self._channel is None:
            raise SandboxGoneError("the fake runtime has been closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        payload = os.memfd_create("coldframe-exec", os.MFD_CLOEXEC)
        try:
            content = marshal.dumps(
                {"argv": list(argv), "env": dict(env), "paths": list(paths), "pty": pty}
            )
            with os.fdopen(os.dup(payload), "wb") as file:
                file.write(content)
            fds = [payload, theirs.fileno(), cwd, *streams]
            socket.send_fds(self._channel, [b"x"], fds)
        except OSError as error:
            ours.close()
            raise SandboxGoneError(f"the fake runtime's zygote is gone: {error}") from error
        finally:
            theirs.close()
            os.close(payload)
        return ours

    async def leaks(self, live: Sequence[str]) -> tuple[str, ...]:
        """See `Runtime.leaks`: directories and process trees of no live sandbox.

        What is just starting or ending gets a grace of 1 s.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LEAK_GRACE_S
        found = self._strays(live)
        while found and loop.time() < deadline:
            await asyncio.sleep(0.01)
            found = self._strays(live)
        return found

    def _strays(self, live: Sequence[str]) -> tuple[str, ...]:
        if self._channel is None or self._zygote is None:
            return ()
        alive = [self._sandboxes[name] for name in live if name in self._sandboxes]
        known = {number for sandbox in alive for number in sandbox.supervisors()}
        strays = [
            f"directory {entry}" for entry in sorted(self.base.iterdir()) if entry.name not in live
        ]
        for supervisor in set(fake_zygote.children(self._zygote.pid)) - known:
            below = fake_zygote.descendants(supervisor)
            strays += [f"process {pid}" for pid in below if process_name(pid) is not None]
        return tuple(strays)
