# Generated from _async/sandbox.py; do not edit.
"""One sandbox: commands, sessions, files, ports, its lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from coldframe.client._arguments import typed_methods
from coldframe.client._core import Streaming
from coldframe.client._inside import SandboxCore
from coldframe.client._requests import Command, Env, ExecOptions, checked, exec_request
from coldframe.client._sessions import SessionCore, session_request
from coldframe.client._sync.files import Files
from coldframe.client._sync.process import OutputStream, Process
from coldframe.client._sync.session import Session
from coldframe.protocol.models import (
    MIB,
    MOST_CHANGES,
    DiskExtension,
    ExecInfo,
    ExecResult,
    FileChanges,
    Fingerprint,
    GuardReport,
    GuardRequest,
    PortUrl,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
)
from coldframe.protocol.network import EgressEvents, NetworkLike, network_policy
from coldframe.protocol.patching import Patched

if TYPE_CHECKING:
    from coldframe.client._core import ClientCore
    from coldframe.client._portal import Connection, Portal


@typed_methods
class Sandbox:
    """One sandbox. Leaving its `with` block deletes it.

    What changes something takes an id: the same again gives the first answer and changes nothing;
    it stands for nothing else (OperationMismatchError), and is refused once its answer is kept no
    longer (OperationExpiredError). What ends in the same state however often it is asked for
    (`delete`, `unguard`) takes none.

    Everything raises SandboxNotFoundError (its record is kept no longer), what takes an operation
    also SandboxStateError and SandboxGoneError (it has ended); besides, what the client raises.
    """

    def __init__(self, core: ClientCore, runner: Portal, info: SandboxInfo) -> None:
        self._client, self._portal, self._info = core, runner, info
        self._core = SandboxCore(core, info.id)
        self.files = Files(self._core, runner)
        """The sandbox's files."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._info.spec.image} {self._info.state}>"

    @property
    def id(self) -> str:
        """`sb-NODE-RANDOM`."""
        return self._info.id

    @property
    def name(self) -> str | None:
        """The name that it was given."""
        return self._info.spec.name

    @property
    def info(self) -> SandboxInfo:
        """What was last heard of it; `refresh` asks again."""
        return self._info

    def refresh(self) -> SandboxInfo:
        """Ask the node what it knows of the sandbox now."""
        self._info = self._portal.run(self._client.get(self.id))
        return self._info

    def renew(self, ttl_s: float | None, *, operation_id: str | None = None) -> SandboxInfo:
        """Let the lease end so many seconds from now; None: never.

        Raises:
            InvalidRequestError: `ttl_s` is not above 0 and at most ten years.
        """
        self._info = self._portal.run(self._core.renew(ttl_s, operation_id))
        return self._info

    def keep(self) -> None:
        """Leave it there when the client closes: it lives until its lease ends.

        On a service. A node in this process ends with its client, and all sandboxes with it.
        """
        self._client.keep(self.id)

    def delete(self) -> None:
        """End it; nothing of it is left when this returns. Twice is fine."""
        self._info = self._portal.run(self._client.delete(self.id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.delete()

    # --- commands ---------------------------------------------------------------------

    def exec(self, command: Command, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a command to its end; what it started may live on and is listed in the result.

        Text is a command line for the shell; a list is argv and is never joined. Interrupting
        or cancelling the call kills the command and all that it started. The options are those
        of `ExecOptions`: cwd, env, user, stdin, deadline_s (default 300), window_bytes,
        spool_bytes, kill_bytes, pty, shell, operation_id, expected_version.

        Raises:
            NotExecutedError and its kin: it was not started; which program, user, directory.
            SandboxGoneError, SandboxStateError: the sandbox takes no commands.
            ConflictError: the sandbox is not at `expected_version`.
            OperationMismatchError, OperationExpiredError: `operation_id` cannot be used again.
            SpawnerLostError: it may have run.
        """
        request = exec_request(command, **options)
        return self._portal.run(self._client.exec(self.id, request))

    def stream(self, command: Command, **options: Unpack[ExecOptions]) -> OutputStream:
        """Run a command and iterate its output as it comes; see `AsyncOutputStream`.

        The command starts with the iteration, which raises as `exec`.
        """
        request = exec_request(command, **options)
        return OutputStream(self._portal, Streaming(self._client, self.id, request))

    def start(
        self, command: Command, *, stdin_open: bool = False, **options: Unpack[ExecOptions]
    ) -> Process:
        """Start a command and go on. It has no deadline unless one is given.

        Args:
            command: as in `exec`.
            stdin_open: keep its stdin open for `write_stdin`; a terminal's always is.
            options: as in `exec`.
        Raises:
            What `exec` raises.
        """
        options.setdefault("deadline_s", None)
        if options.get("pty"):
            stdin_open = True
        request = exec_request(command, stdin_open=stdin_open, **options)
        operation_id = self._portal.run(self._core.start(request))
        return Process(self._core, self._portal, operation_id)

    def attach(self, operation_id: str) -> Process:
        """Return the handle of a command that runs or ran; its output is read from a cursor.

        Raises:
            OperationNotFoundError, OperationExpiredError: it is not known any more.
        """
        self._portal.run(self._core.poll(operation_id))
        return Process(self._core, self._portal, operation_id)

    def session(
        self,
        shell: str = "/bin/sh",
        *,
        env: Env | None = None,
        cwd: str | bytes | None = None,
        user: str | int | None = None,
        window_bytes: int = MIB,
        spool_bytes: int = 64 * MIB,
        operation_id: str | None = None,
    ) -> Session:
        """Start a shell that keeps its directory, variables and functions between commands.

        Args:
            shell: any POSIX shell of the image.
            env: merged over the sandbox's; a null value removes.
            cwd: where it starts; None: the sandbox's workdir.
            user: None: the sandbox's.
            window_bytes: per stream, how much of a command's output its result carries.
            spool_bytes: per stream, how much of the session's output is kept on the node.
            operation_id: the same id again gives the same session.
        Raises:
            NotExecutedError and its kin: it was not started.
            SessionEndedError: it is not a POSIX shell.
        """
        request = session_request(
            shell, env=env, cwd=cwd, user=user, spool_bytes=spool_bytes, operation_id=operation_id
        )
        starting = SessionCore.start(self._client, self.id, request, window_bytes)
        return Session(self._portal.run(starting), self._portal)

    def attach_session(self, operation_id: str, *, window_bytes: int = MIB) -> Session:
        """Return the handle of a session that was started before, by whichever client.

        Raises:
            OperationNotFoundError, OperationExpiredError: it is not known any more.
        """
        finding = SessionCore.attach(self._client, operation_id, window_bytes)
        return Session(self._portal.run(finding), self._portal)

    def sessions(self) -> tuple[SessionInfo, ...]:
        """The sessions whose shell lives, oldest first."""
        return self._portal.run(self._core.sessions())

    # --- files ------------------------------------------------------------------------

    def apply_patch(
        self,
        patch: str | bytes,
        base_sha256: Mapping[str, str] | None = None,
        *,
        root: str | None = None,
        strip: int = 1,
        operation_id: str | None = None,
    ) -> Patched:
        """Apply a unified diff, all of it or nothing. Needs no program in the image.

        Hunks must fit exactly where they say: nothing is guessed. New files, deletions, renames,
        copies and mode changes as git writes them are understood; binary patches, links and
        submodules are refused.

        Args:
            patch: one or more files' changes.
            base_sha256: digests (hex) of files, by their path in the patch; what differs
                refuses the patch.
            root: the directory that the patch's paths are in; None: the sandbox's workdir.
            strip: how many leading parts of the paths to leave out, as `patch -p`.
            operation_id: see the class. A service then takes patches of 4 MiB, to files of 16 MiB
                together (TooLargeError).
        Raises:
            StaleBaseError: a file is not what `base_sha256` says, or changed meanwhile.
            PatchError: it is malformed or does not fit; the message names file, hunk and line.
            FileError: reading or writing failed. No file is changed in any of these cases.
        """
        where = root or self._info.workdir
        return self._portal.run(
            self._core.apply_patch(
                patch, base_sha256, root=where, strip=strip, operation_id=operation_id
            )
        )

    def fingerprint(self) -> Fingerprint:
        """Digest files, processes, ports, users, limits and network policy.

        Raises:
            NotKnownError, FileTooLargeError: there is too much in it to be looked through.
        """
        return self._portal.run(self._core.fingerprint())

    def changes(self, since: str | None = None, *, limit: int = MOST_CHANGES) -> FileChanges:
        """List which files were created, changed (content, mode or owner) or removed.

        Looks only at what was written over the image. It tells how two instants differ, not which
        command, or what is left running, did it; what falls under the look may be told by the next.

        Args:
            since: the `mark` of an earlier answer; the last four of a sandbox are kept. None:
                what differs from the image.
            limit: how many paths to list, at most 1,000; all are counted.
        Raises:
            NotKnownError: the mark is not kept, or the sandbox holds too much to tell in 10 s.
            FileError: its files kept changing.
            CapabilityError: the runtime cannot tell.
        """
        return self._portal.run(self._core.changes(since, limit))

    # --- processes, ports -------------------------------------------------------------

    def commands(self) -> tuple[ExecInfo, ...]:
        """Commands that run, or ended and whose results are kept: the newest 1,000, oldest first.

        Those of sessions and their shells, too. `attach` takes their ids.
        """
        return self._portal.run(self._core.commands())

    def processes(self) -> tuple[ProcessInfo, ...]:
        """All processes but pid 1, each with the operation that started it where known."""
        return self._portal.run(self._core.processes())

    def kill_processes(
        self, operation_id: str | None = None, *, idempotency_key: str | None = None
    ) -> tuple[ProcessInfo, ...]:
        """Kill all of one command, or everything but pid 1; return what is dead now.

        `operation_id` is the command's; `idempotency_key` is what elsewhere is called so.
        """
        return self._portal.run(self._core.kill_processes(operation_id, idempotency_key))

    def listening_ports(self) -> tuple[int, ...]:
        """TCP ports that something in the sandbox listens on."""
        return self._portal.run(self._core.listening_ports())

    def port_url(
        self, port: int, *, ttl_s: float = 3600.0, operation_id: str | None = None
    ) -> PortUrl:
        """Return a URL by which a browser reaches a port: HTTP and WebSocket, without a key.

        It cannot be guessed; whoever has it may use it. It leads nowhere once `ttl_s` (at most a
        week) are over or the sandbox ends. Programs use `connect`, which needs no URL.

        Raises:
            CapabilityError: the node is in this process, or its service listens on no TCP address.
        """
        return self._portal.run(self._core.port_url(port, ttl_s, operation_id))

    # --- guards -----------------------------------------------------------------------

    def extend_disk(self, extra_bytes: int, *, operation_id: str | None = None) -> None:
        """Let it hold so much more (at most 256 MiB) than its disk limit says, so that what has
        filled it can be judged. Without a limit nothing changes.

        Raises:
            InvalidRequestError: more than that.
        """
        extension = checked(DiskExtension, {"extra_bytes": extra_bytes})
        self._portal.run(self._core.extend_disk(extension, operation_id))

    def guard(
        self,
        path: str,
        operation_id: str,
        names: Sequence[str],
        *,
        owner: tuple[int, int] = (0, 0),
        size_bytes: int = 64 * MIB,
        trusted: Sequence[str] = (),
        idempotency_key: str | None = None,
    ) -> None:
        """Mount an empty directory over one that is there, which one command alone may write.

        That command is started after this, with the same `operation_id`. Who has run code that is
        neither the image's nor was brought after this may not write the named files. How that is
        told: docs/adr/0045.

        Args:
            path: a directory.
            names: files in it that are vouched for in the report.
            owner: the sandbox's ids of it, which alone may enter.
            size_bytes: what it may hold.
            trusted: paths whose code may be run by what writes the named files.
            idempotency_key: as in `kill_processes`.
        Raises:
            CapabilityError: it cannot be guarded here.
            ConflictError: one is guarded already.
            FileError: the path is no directory.
        """
        given = {
            "path": path,
            "operation_id": operation_id,
            "names": tuple(names),
            "owner": owner,
            "size_bytes": size_bytes,
            "trusted": tuple(trusted),
        }
        self._portal.run(self._core.guard(checked(GuardRequest, given), idempotency_key))

    def guard_report(self) -> GuardReport:
        """End all writing in the guarded directory, and tell what is in it.

        Raises:
            ConflictError: none is guarded.
        """
        return self._portal.run(self._core.guard_report())

    def unguard(self) -> None:
        """Take the guarded directory away with all that is in it; that there is none is fine."""
        self._portal.run(self._core.unguard())

    # --- network ----------------------------------------------------------------------

    def set_network(
        self,
        network: NetworkLike,
        *,
        expected_version: int | None = None,
        operation_id: str | None = None,
    ) -> SandboxInfo:
        """Change what it may reach; connections that are no longer allowed are cut at once.

        Args:
            network: as in `create_sandbox`; None: nothing but itself.
            expected_version: refuse with ConflictError if the sandbox has another version.
        Raises:
            InvalidRequestError: a text is no rule.
            CapabilityError: the runtime cannot enforce it.
        """
        policy = network_policy(network)
        setting = self._core.set_network(policy, expected_version, operation_id)
        self._info = self._portal.run(setting)
        return self._info

    def egress_events(self, cursor: int = 0, limit: int = 1000) -> EgressEvents:
        """What it asked of the network and what was decided, from a cursor on (0: the first).

        `next_cursor` is where to go on. The oldest events of many are dropped; `dropped` says
        how many are missing.
        """
        return self._portal.run(self._core.egress_events(cursor, limit))

    def connect(self, port: int) -> Connection:
        """Connect to a TCP port of the sandbox, from within; the caller closes what it gets.

        A pair of stream reader and writer in the asynchronous SDK, a socket in the other.

        Raises:
            PortUnreachableError: nothing accepts connections there.
        """
        return self._portal.connect(self._core.connect(port))
