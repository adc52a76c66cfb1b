"""A native sandbox's guarded directory: one at a time, for one command."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from coldframe.host import guard_mount
from coldframe.host.cgroups import Strain, strain
from coldframe.host.fanotify import Listener
from coldframe.host.fileops import kind_of
from coldframe.host.fsthreads import run_to_its_end
from coldframe.host.guard import Guard, Kept
from coldframe.host.guard_command import cgroup_of
from coldframe.host.guard_judge import Refused
from coldframe.host.guard_mount import Site, Wanted
from coldframe.host.processes import namespace_of
from coldframe.host.roottree import closing, path_bytes, typed_errors
from coldframe.host.spawner import Started
from coldframe.protocol.errors import (
    CapabilityError,
    CapacityError,
    ConflictError,
    PathExistsError,
    SandboxGoneError,
)
from coldframe.protocol.models import (
    GuardedFile,
    GuardRefusal,
    GuardReport,
    GuardRequest,
)
from coldframe.protocol.text import excerpt
from coldframe.runtimes.native_parts import Parts

MOST_AT_ONCE = 60
"""Of one node. The kernel gives a user 128 groups (fs.fanotify.max_user_groups), each takes two."""
_MOST_OF_ONE = MOST_AT_ONCE * 3 // 4
"""Of one owner, who may hold them as long as it likes."""
_FULL = frozenset((errno.EMFILE, errno.ENFILE))


class GuardSlots:
    """Whose turn it is to guard; whoever has no owner is the node's own, and waits for no share."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(MOST_AT_ONCE)
        self._shares: dict[str, asyncio.Semaphore] = {}

    async def acquire(self, owner: str | None) -> None:
        """Wait for a slot and take it."""
        share = None
        if owner is not None:
            share = self._shares.setdefault(owner, asyncio.Semaphore(_MOST_OF_ONE))
            await share.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            if share is not None:
                share.release()
            raise

    def release(self, owner: str | None) -> None:
        """Give one back."""
        self._all.release()
        if owner is not None:
            self._shares[owner].release()


def refusal() -> str | None:
    """Return why no directory can be guarded on this machine; None: it can be."""
    try:
        Listener().close()
    except OSError as error:
        if error.errno not in _FULL:
            return f"this kernel's fanotify is not to be had: {error.strerror}"
    return None


class NativeGuard:
    """Guards a directory of one sandbox; see `SandboxHandle.guard`."""

    def __init__(self, parts: Parts, slots: GuardSlots, owner: str | None) -> None:
        self._slots, self._owner = slots, owner
        self._created, self._files, self._layers = parts.created, parts.files, parts.layers
        self._cgroups = parts.cgroups
        self._ready_ns = guard_mount.file_time_ns()
        self._guard: Guard | None = None
        self._strain = Strain(0.0, 0)
        self._namespace = -1
        self.operation_id: str | None = None
        """Of the command that may write."""

    async def begin(self, request: GuardRequest, others: Iterable[int]) -> None:
        """See `SandboxHandle.guard`. `others` are processes that live, by their host pids."""
        if self._guard is not None:
            raise ConflictError(
                f"sandbox {self._created.sandbox_id!r} guards a directory already; unguard it first"
            )
        await self._slots.acquire(self._owner)
        try:
            self._namespace = self._open_namespace()
            self._guard = await run_to_its_end(self._begin, request, tuple(others))
            self.operation_id = request.operation_id
            self._strain = strain(self._cgroups, self._created.sandbox_id)
        except BaseException:
            self._slots.release(self._owner)
            self._close_namespace()
            raise

    def _begin(self, request: GuardRequest, others: tuple[int, ...]) -> Guard:
        path = path_bytes(request.path)
        tree = self._files.tree
        site = Site(
            *(self._created.pid, self._namespace, tree.root, tree.id_base),
            *(self._layers, self._ready_ns),
        )
        wanted = Wanted(
            owner=(tree.host_id(request.owner[0]), tree.host_id(request.owner[1])),
            size_bytes=request.size_bytes,
            names=frozenset(map(os.fsencode, request.names)),
            trusted=[os.fsencode(one) for one in request.trusted],
            others=frozenset(filter(None, map(cgroup_of, others))),
        )
        with typed_errors(path):
            target = tree.open(path)
        with closing(target):
            if not stat.S_ISDIR(os.fstat(target).st_mode):
                raise PathExistsError(f"{excerpt(request.path)} is no directory")
            try:
                return guard_mount.begin(site, target, wanted)
            except OSError as error:
                if error.errno in _FULL:
                    # To say that it cannot be guarded would cost a verdict its guard.
                    raise CapacityError(
                        f"{excerpt(request.path)} was not guarded: no descriptor is left, or none "
                        "of fs.fanotify.max_user_groups; keep fewer guards at once"
                    ) from error
                raise CapabilityError(
                    f"{excerpt(request.path)} cannot be guarded: {error.strerror or error}"
                ) from error

    def _open_namespace(self) -> int:
        created = self._created
        try:
            fd = os.open(f"/proc/{created.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxGoneError(f"sandbox {created.sandbox_id!r} has ended") from error
        if namespace_of(created.pid, "mnt") != created.namespaces["mnt"]:
            os.close(fd)
            raise SandboxGoneError(f"sandbox {created.sandbox_id!r} has ended")
        return fd

    def admit(self, started: Started) -> None:
        """The command has begun."""
        if self._guard is not None:
            self._guard.admit(started.host_pid)

    async def report(self) -> GuardReport:
        """See `SandboxHandle.guard_report`."""
        if self._guard is None:
            raise ConflictError(f"no directory of {self._created.sandbox_id!r} is guarded")
        kept = await run_to_its_end(self._guard.report)
        judge = self._guard.judge
        touched = judge.touched()
        now = strain(self._cgroups, self._created.sandbox_id)
        return GuardReport(
            files=tuple(map(_file, kept)),
            displaced=tuple(map(os.fsdecode, self._guard.displaced(kept))),
            refused=tuple(map(_refusal, judge.refused)),
            touched=None if touched is None else os.fsdecode(touched),
            alone=not judge.command.others,
            lost=self._guard.lost,
            cpu_s=now.cpu_s - self._strain.cpu_s,
            forks_refused=now.forks_refused - self._strain.forks_refused,
        )

    async def end(self, *, unmount: bool) -> None:
        """Give everything back; the mount goes with the sandbox if it is not unmounted."""
        ended, self._guard, self.operation_id = self._guard, None, None
        if ended is None:
            return
        try:
            if unmount:
                await run_to_its_end(guard_mount.unmount, ended, self._namespace)
        finally:
            await run_to_its_end(ended.close, partial(self._release, asyncio.get_running_loop()))
            self._close_namespace()

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop has ended, and whoever waited for the slot
            loop.call_soon_threadsafe(self._slots.release, self._owner)

    def _close_namespace(self) -> None:
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


def _file(kept: Kept) -> GuardedFile:
    return GuardedFile(
        name=os.fsdecode(kept.name),
        kind=kind_of(kept.mode),
        size=kept.size,
        nlink=kept.links,
        vouched=kept.vouched,
        content=kept.content,
    )


def _refusal(one: Refused) -> GuardRefusal:
    return GuardRefusal(
        at=one.at,
        program=one.program,
        name=os.fsdecode(one.name),
        outsider=one.outsider,
        cause=os.fsdecode(one.cause),
    )
