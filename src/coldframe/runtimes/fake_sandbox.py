"""One sandbox of the fake runtime: a directory, and the host processes that were started in it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.host.fsthreads import run_to_its_end
from coldframe.host.patience import Patience
from coldframe.host.rootfs import RootFiles
from coldframe.host.roottree import closing
from coldframe.host.treewalk import DIRECTORY
from coldframe.images.base import Image
from coldframe.protocol.errors import (
    CapabilityError,
    ConflictError,
    CreateError,
    PortUnreachableError,
    SandboxGoneError,
    WorkdirNotFoundError,
)
from coldframe.protocol.models import (
    ExecRequest,
    FileChanges,
    GuardReport,
    GuardRequest,
    ProcessInfo,
    Reason,
    SandboxSpec,
)
from coldframe.protocol.network import EgressEvents, NetworkPolicy
from coldframe.protocol.text import excerpt
from coldframe.runtimes.base import FileAccess, Gone
from coldframe.runtimes.fake_exec import FakeExec
from coldframe.runtimes.fake_request import Planner, workdir_of
from coldframe.runtimes.fake_streams import open_streams
from coldframe.runtimes.file_changes import look
from coldframe.runtimes.file_marks import MarksInMemory, changes

if TYPE_CHECKING:
    from coldframe.runtimes.fake import FakeRuntime

_PASSWD = b"root:x:0:0:root:/root:/bin/sh\n"


def require_no_egress(policy: NetworkPolicy) -> None:
    """Raise CapabilityError for a policy: it could not be enforced."""
    if not policy.empty:
        raise CapabilityError(
            "the fake runtime cannot enforce a network policy; use the native runtime"
        )


class FakeSandbox:
    """See `SandboxHandle`."""

    def __init__(self, runtime: FakeRuntime, sandbox_id: str, spec: SandboxSpec, image: Image):
        self._runtime = runtime
        self._id = sandbox_id
        self.directory = runtime.base / sandbox_id
        self._planner = Planner(self.directory, image, spec)
        self._workdir = workdir_of(image, spec)
        self._files: RootFiles | None = None
        self._execs: set[FakeExec] = set()
        self._end: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._marks = MarksInMemory()
        self._as_created = b""
        self.gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """Its id."""
        return self._id

    @property
    def files(self) -> FileAccess:
        """The sandbox's directory as `/`."""
        if self._files is None:
            raise SandboxGoneError(f"sandbox {self._id!r} has no files yet")
        return self._files

    # --- making -----------------------------------------------------------------------

    def make_tree(self) -> None:
        """Make the directory and what every image has: /tmp, /root, /etc/passwd, a workdir."""
        root = self.directory
        root.mkdir(mode=0o755)
        for name, mode in (("tmp", 0o1777), ("root", 0o700), ("etc", 0o755)):
            (root / name).mkdir()
            (root / name).chmod(mode)
        (root / "etc/passwd").write_bytes(_PASSWD)
        (root / self._workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def open_tree(self) -> None:
        """Open what was made."""
        root = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._files = RootFiles(root, os.getuid(), self._runtime.threads, lambda _: (0, 0))
        with closing(os.open(self.directory, DIRECTORY)) as tree:
            self._as_created = look(tree, (), b"", Patience(math.inf), 0).index

    # --- exec -------------------------------------------------------------------------

    async def start_exec(self, request: ExecRequest, operation_id: str) -> FakeExec:
        """See `SandboxHandle.start_exec`."""
        self._require_alive()
        plan = self._planner.plan(request)
        cwd = self._open_cwd(plan.cwd)
        try:
            running = FakeExec(plan.request, operation_id, self._id, ended=self._execs.discard)
            streams = open_streams(plan.request)
            self._execs.add(running)
            try:
                status = self._runtime.launch(
                    plan.argv,
                    plan.env,
                    plan.paths,
                    cwd,
                    streams.theirs,
                    pty=request.pty is not None,
                )
            finally:
                streams.close_theirs()
        finally:
            os.close(cwd)
        failure = await running.begin(status, streams)
        if failure is not None:
            raise self._planner.error(plan, *failure)
        return running

    def _open_cwd(self, cwd: bytes) -> int:
        try:
            assert self._files is not None
            return self._files.tree.open(cwd, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise WorkdirNotFoundError(
                f"working directory {excerpt(cwd)}: {os.strerror(error.errno or 0)}"
            ) from error

    # --- processes, ports -------------------------------------------------------------

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """See `SandboxHandle.processes`."""
        self._require_alive()
        return self.own_processes()

    def supervisors(self) -> list[int]:
        """Pids of the processes below which everything of it runs."""
        return [e.supervisor for e in self._execs if e.supervisor is not None]

    def own_processes(self) -> tuple[ProcessInfo, ...]:
        """All that runs, also while it is being ended."""
        return tuple(info for running in list(self._execs) for info in running.processes())

    async def kill_processes(self, operation_id: str | None = None) -> tuple[ProcessInfo, ...]:
        """See `SandboxHandle.kill_processes`."""
        self._require_alive()
        chosen = [e for e in self._execs if operation_id in (None, e.operation_id)]
        killed = await asyncio.gather(*(running.kill() for running in chosen))
        return tuple(info for infos in killed for info in infos)

    async def listening_ports(self) -> tuple[int, ...]:
        """See `SandboxHandle.listening_ports`; those of the sandbox's own processes."""
        pids = [info.pid for info in await self.processes()]
        inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
        return tuple(sorted({port for port, inode in _listeners() if inode in inodes}))

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `SandboxHandle.connect`."""
        if port in await self.listening_ports():
            for address in ("127.0.0.1", "::1"):
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection(address, port)
        raise PortUnreachableError(f"nothing in the sandbox accepts connections on port {port}")

    async def set_network(self, policy: NetworkPolicy) -> None:
        """See `SandboxHandle.set_network`: its commands use the host's network, always."""
        self._require_alive()
        require_no_egress(policy)

    def egress_events(self, cursor: int, limit: int) -> EgressEvents:
        """See `SandboxHandle.egress_events`: nothing is decided here."""
        del limit
        return EgressEvents(events=(), next_cursor=max(cursor, 0))

    # --- guards -----------------------------------------------------------------------

    async def extend_disk(self, extra_bytes: int) -> None:
        """See `SandboxHandle.extend_disk`: it has no limit."""

    async def guard(self, request: GuardRequest) -> None:
        """See `SandboxHandle.guard`: its commands are the host's, and nobody watches them."""
        raise CapabilityError(f"the fake runtime cannot guard {excerpt(request.path)}")

    async def guard_report(self) -> GuardReport:
        """See `SandboxHandle.guard_report`."""
        raise ConflictError(f"no directory of sandbox {self.id!r} is guarded")

    async def unguard(self) -> None:
        """See `SandboxHandle.unguard`."""

    # --- ending -----------------------------------------------------------------------

    async def changes(self, since: str | None, most: int, limit_s: float) -> FileChanges:
        """See `SandboxHandle.changes`."""
        self._require_alive()
        patience = Patience(limit_s)
        async with self._looking:
            with closing(os.open(self.directory, DIRECTORY)) as tree:
                return await run_to_its_end(
                    partial(changes, most=most, patience=patience, as_created=self._as_created),
                    *(tree, (), self._marks, since),
                    cancelled=patience.lose,
                )

    async def export_upper(self, target: Path) -> None:
        """See `SandboxHandle.export_upper`; there is no image below, so all of the tree."""
        await self.kill_processes()
        copy = await asyncio.create_subprocess_exec(
            "cp", "-a", f"{self.directory}/.", str(target), stdin=subprocess.DEVNULL
        )
        try:
            code = await copy.wait()
        except BaseException:
            copy.kill()
            await copy.wait()
            raise
        if code != 0:
            raise CreateError(f"could not copy the sandbox's tree to {target}")

    async def destroy(self) -> None:
        """See `SandboxHandle.destroy`."""
        if self._end is None:
            self._end = asyncio.get_running_loop().create_task(self._destroy())
        await asyncio.shield(self._end)

    async def _destroy(self) -> None:
        await asyncio.gather(*(running.aclose() for running in list(self._execs)))
        if self._files is not None:
            self._files.close()
        if self.directory.exists():
            await asyncio.to_thread(shutil.rmtree, self.directory)
        self._runtime.forget(self._id)

    def die(self, cause: str) -> None:
        """End as a sandbox does whose pid 1 was killed: its commands end, `gone` resolves."""
        if not self.gone.done() and self._end is None:
            for running in list(self._execs):
                running.end(Reason.SANDBOX_GONE)
            self.gone.set_result(Gone(cause))

    def _require_alive(self) -> None:
        if self._end is not None or self.gone.done():
            raise SandboxGoneError(f"sandbox {self._id!r} has ended")


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _listeners() -> list[tuple[int, str]]:
    """TCP ports that are listened on in this network namespace, with their sockets' inodes."""
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found.append((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return found
