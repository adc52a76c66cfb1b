"""What crosses the seams: sandboxes, execs, files. Frozen, checked when they are made.

Sizes are bytes, durations are seconds, times are Unix seconds unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coldframe.protocol.network import EgressEvent, NetworkPolicy

MIB = 1 << 20
GIB = 1 << 30


HASHED_FILE_BYTES = 16 * MIB
"""Of a changed file up to this size the digest is told."""
MOST_CHANGES = 1000
"""Changed paths that are told at once; all are counted."""


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


# What a caller asks for is taken as it is: True is no number of seconds, "2" no processors.
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


# --- sandboxes ------------------------------------------------------------------------


class SandboxState(StrEnum):
    """States of the life cycle; see the design."""

    REQUESTED = "requested"
    PROVISIONING = "provisioning"
    READY = "ready"
    PAUSED = "paused"
    TERMINATING = "terminating"
    DELETED = "deleted"
    FAILED = "failed"
    LOST = "lost"


class SandboxSpec(_Model):
    """What a caller asks for. Every default is a limit that is enforced."""

    image: str
    cpu: Number = Field(default=4.0, ge=0.01, le=4096)
    memory_bytes: Whole = Field(default=4 * GIB, ge=4 * MIB, le=1 << 50)
    pids: Whole = Field(default=1024, ge=4, le=1 << 22)
    disk_bytes: Whole | None = Field(default=None, ge=MIB, le=1 << 50)
    """Limit on what the sandbox may write; None: what the store has.

    Refused by a store that cannot enforce it.
    """
    shm_bytes: Whole = Field(default=GIB, ge=MIB, le=1 << 40)
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    """None: the image's."""
    user: str | Whole | None = None
    """Name or id, optionally `user:group`; None: the image's."""
    labels: dict[str, str] = Field(default_factory=dict)
    ttl_s: Number | None = Field(default=7200.0, gt=0, le=10 * 365 * 86400)
    """Lease: the sandbox is deleted this long after its creation or last renewal; None: never."""
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$")
    no_new_privileges: Flag = False
    network: NetworkPolicy = NetworkPolicy()
    """What it may reach; the default: nothing but itself."""


class Quota(_Model):
    """How much of a node an owner's live sandboxes may be limited to, together. None: any."""

    sandboxes: Whole | None = Field(default=None, ge=0)
    cpu: Number | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_bytes: Whole | None = Field(default=None, ge=0)
    disk_bytes: Whole | None = Field(default=None, ge=0)
    """With it, every sandbox of the owner's must say how much it may write."""


class ImageHealthcheck(_Model):
    """How an image says to ask whether what it starts is well. Times in seconds."""

    argv: tuple[str, ...]
    """Exit code 0: healthy."""
    interval_s: float
    timeout_s: float
    start_period_s: float
    start_interval_s: float
    retries: int


class ImageStart(_Model):
    """What a container of the image would start. A sandbox starts nothing by itself."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    healthcheck: ImageHealthcheck | None = None


class SandboxInfo(_Model):
    """What the node knows of one sandbox at one moment."""

    id: str
    node_id: str
    runtime: str
    spec: SandboxSpec
    image_digest: str
    layer_digests: tuple[str, ...] = ()
    image_start: ImageStart = ImageStart()
    workdir: str = "/"
    """Where commands start: what the specification says, else the image."""
    state: SandboxState
    version: int
    """Raised by every transition of state."""
    created_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    expired: bool = False
    """Its lease ended: deleted, or kept until `kept_until`."""
    kept_until: float | None = None
    """Its lease ended, and until then what it holds can be read; it runs nothing."""
    queued_s: float = 0.0
    """How long its create waited on the node for its turn."""
    reason: str | None = None
    """Why it failed, was lost or is gone."""
    trace_id: str | None = None
    """Of the request that made it: 32 hex digits."""


class Ledger(_Model):
    """created = deleted + expired + failed + lost + live + leaked, and leaked must be 0.

    The first six count what the node did; `leaks` names what the kernel has beyond that
    (cgroups, mounts, namespaces, processes, directories) and `leaked` counts sandboxes or
    strays behind them.
    """

    created: int
    deleted: int
    expired: int
    failed: int
    lost: int
    live: int
    leaked: int
    leaks: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether the sum holds and nothing is leaked."""
        ended = self.deleted + self.expired + self.failed + self.lost
        return self.leaked == 0 and self.created == ended + self.live


# --- exec -----------------------------------------------------------------------------


class Reason(StrEnum):
    """Why an exec ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    DEADLINE = "deadline"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    SANDBOX_GONE = "sandbox_gone"
    INFRASTRUCTURE = "infrastructure"


class PtySize(_Model):
    """A terminal's size in characters."""

    rows: Annotated[Whole, Field(ge=1, le=65535)] = 24
    cols: Annotated[Whole, Field(ge=1, le=65535)] = 80


Argument = Annotated[str | bytes, Field(union_mode="left_to_right")]


class ExecRequest(_Model):
    """One command. Exactly one of `argv` and `command` is given.

    Text is encoded as UTF-8 with surrogate escapes; bytes go as they are.
    """

    argv: tuple[Argument, ...] | None = None
    command: Argument | None = None
    """A command line, run by `shell` as `SHELL -c COMMAND`."""
    shell: str = "/bin/sh"
    cwd: Argument | None = None
    """None: the sandbox's workdir."""
    env: dict[Argument, Argument | None] = Field(default_factory=dict)
    """Merged over the sandbox's; a null value removes."""
    user: str | Whole | None = None
    """Name or id, optionally `user:group`; None: the sandbox's."""
    stdin: bytes | None = None
    """What the command reads; None: end of file at once."""
    stdin_open: Flag = False
    """Keep stdin open for `write_stdin`; `stdin` is then written first."""
    deadline_s: Number | None = Field(default=300.0, gt=0, le=10 * 365 * 86400)
    """The whole tree is killed after this long; None: never."""
    window_bytes: Whole = Field(default=MIB, ge=0, le=64 * MIB)
    """Per stream, how much the result carries: head and tail, half each."""
    spool_bytes: Whole = Field(default=64 * MIB, ge=8192, le=1 << 40)
    """Per stream, how much is kept on the node: head and tail, half each."""
    kill_bytes: Whole | None = Field(default=None, ge=1)
    """Kill the command when stdout and stderr together exceed this; None: never."""
    pty: PtySize | None = None
    """Run on a terminal of the sandbox's; stdout holds everything, stderr is empty."""
    status_pipe: Flag = False
    """Give the command, as its descriptor 3, the writing end of a pipe that is neither stdout nor
    stderr. What is written there is the stream `status`, read with `RunningExec.read`. Sessions
    learn exit codes by it. Not counted in output limits, totals or digests; kept to its last MiB.
    """
    operation_id: str | None = None
    expected_version: Whole | None = None

    @model_validator(mode="after")
    def _one_command(self) -> ExecRequest:
        if (self.argv is None) == (self.command is None):
            raise ValueError("give exactly one of argv and command")
        if self.argv is not None and not self.argv:
            raise ValueError("argv is empty: its first element names the program")
        if self.pty is not None and self.stdin is not None and not self.stdin_open:
            raise ValueError("a terminal's stdin is written with write_stdin; set stdin_open")
        return self


class ProcessInfo(_Model):
    """A process of the sandbox: its pid inside, and its name (hostile text)."""

    pid: int
    name: str
    operation_id: str | None = None


class Output(_Model):
    """One stream of one exec: the whole by length and digest, and the window that was kept."""

    total_bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    """Hex digest of the whole stream up to the command's end.

    Empty when it is not known: a command of a session that wrote faster than it could be read.
    """
    head: bytes = b""
    tail: bytes = b""
    """Empty unless bytes were left out between head and tail."""

    @property
    def omitted_bytes(self) -> int:
        """How many bytes between head and tail the window leaves out."""
        return self.total_bytes - len(self.head) - len(self.tail)

    @property
    def window(self) -> bytes:
        """The whole stream if it fits, else head, a line that says what is missing, tail."""
        if self.omitted_bytes == 0:
            return self.head + self.tail
        return self.head + b"\n[... %d bytes omitted ...]\n" % self.omitted_bytes + self.tail


class Resources(_Model):
    """What one exec used. None: not known on this machine, never a guess."""

    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    memory_peak_bytes: int | None = None
    """Largest resident set among the command and the children it waited for."""
    read_bytes: int | None = None
    write_bytes: int | None = None
    oom_kills: int | None = None
    """Processes of the sandbox that the OOM killer ended meanwhile."""


class ExecResult(_Model):
    """How a command ended. Not an exception, whatever its exit code."""

    operation_id: str
    sandbox_id: str
    reason: Reason
    exit_code: int | None = None
    """Set when the command exited by itself, else None."""
    signal: int | None = None
    """Set when a signal ended it."""
    out: Output = Output()
    err: Output = Output()
    started_at: float
    ended_at: float
    duration_s: float
    queued_s: float = 0.0
    """How long it waited on the node for its turn, before `started_at`."""
    resources: Resources = Resources()
    leftovers: tuple[ProcessInfo, ...] = ()
    """Processes that the command left running."""
    request: ExecRequest
    """The request as it was normalised: shell, cwd, user and environment filled in."""
    trace_id: str | None = None
    """Of the request that ran it: 32 hex digits."""

    @property
    def stdout(self) -> bytes:
        """The window of stdout; whole unless `out.omitted_bytes`."""
        return self.out.window

    @property
    def stderr(self) -> bytes:
        """The window of stderr; whole unless `err.omitted_bytes`."""
        return self.err.window

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether it exited by itself with 0."""
        return self.reason is Reason.EXIT and self.exit_code == 0

    @property
    def returncode(self) -> int:
        """As a shell would say it: the exit code, or 128 + signal."""
        return self.exit_code if self.exit_code is not None else 128 + (self.signal or 9)


Stream = Literal["stdout", "stderr", "status"]
"""`status` is there only for an exec that was asked for with `status_pipe`."""


class OutputChunk(_Model):
    """Bytes of one stream from a cursor on."""

    stream: Stream
    offset: int
    """Where `data` begins in the stream; beyond the cursor asked for if bytes were dropped."""
    data: bytes
    dropped_bytes: int = 0
    """Bytes between the cursor asked for and `offset` that the spool no longer has."""
    eof: bool = False
    """Nothing follows `data`."""

    @property
    def next_cursor(self) -> int:
        """The cursor to ask for next."""
        return self.offset + len(self.data)


class SignalScope(StrEnum):
    """Whom a signal reaches."""

    LEADER = "leader"
    GROUP = "group"
    TREE = "tree"
    """Every process that the exec started, daemonised ones too."""
    CHILDREN = "children"
    """The tree without its leader."""


# --- sessions -------------------------------------------------------------------------


class SessionRequest(_Model):
    """A shell that is to live on between commands."""

    shell: str = "/bin/sh"
    """Any POSIX shell of the image."""
    cwd: Argument | None = None
    """None: the sandbox's workdir."""
    env: dict[Argument, Argument | None] = Field(default_factory=dict)
    """Merged over the sandbox's; a null value removes."""
    user: str | Whole | None = None
    """Name or id, optionally `user:group`; None: the sandbox's."""
    spool_bytes: Whole = Field(default=64 * MIB, ge=8192, le=1 << 40)
    """Per stream, how much of what its commands write is kept on the node: head and tail."""
    operation_id: str | None = None
    """Is the session's id; the same with the same request is the same session."""


class SessionExecRequest(_Model):
    """One command line of a session."""

    command: Argument
    """Any number of lines."""
    env: dict[Argument, Argument] = Field(default_factory=dict)
    """For this command alone."""
    deadline_s: Number | None = Field(default=300.0, gt=0, le=10 * 365 * 86400)
    """Then it and all background jobs of the session are killed; None: never."""
    window_bytes: Whole = Field(default=MIB, ge=0, le=64 * MIB)
    """Per stream, how much the result carries: head and tail, half each."""
    operation_id: str | None = None


class SessionInfo(_Model):
    """What the node knows of one session at one moment."""

    id: str
    """The operation id of its shell."""
    sandbox_id: str
    shell: str
    started_at: float
    running: str | None = None
    """The operation id of the command that runs."""
    ended: ExecResult | None = None
    """How the shell ended; None: it takes commands."""


class SessionResult(_Model):
    """How a command of a session ended."""

    result: ExecResult
    ended: ExecResult | None = None
    """How the shell has ended since; None: it takes commands."""


# --- files ----------------------------------------------------------------------------


class FileKind(StrEnum):
    """What a path is."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


class FileStat(_Model):
    """Metadata of one path in the sandbox; ids are the sandbox's own."""

    kind: FileKind
    mode: int
    """Permission bits, 0 to 0o7777."""
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Of its last change of content, names or metadata; nobody inside can set it."""
    nlink: int
    blocks: int
    """Allocated blocks of 512 bytes."""
    target: bytes | None = None
    """Of a link."""


class FileEntry(_Model):
    """One name in a directory. The name is hostile bytes."""

    name: bytes
    stat: FileStat


class Change(StrEnum):
    """What became of a path between two looks."""

    CREATED = "created"
    CHANGED = "changed"
    """Its content, kind, mode or owner."""
    REMOVED = "removed"


class FileChange(_Model):
    """One path that is not what it was. The path is hostile bytes."""

    path: bytes
    """Absolute."""
    change: Change
    kind: FileKind
    """As it is now; of what was removed, as it was."""
    size: int = 0
    """Of a file as it is now; else 0."""
    sha256: str | None = None
    """Of a file's content; None: not read, for it is over HASHED_FILE_BYTES or the look's sum."""


class FileChanges(_Model):
    """How a sandbox's files differ between two looks; it says nothing of who changed them."""

    since: str | None
    """The mark of the look before; None: compared with the image."""
    mark: str | None
    """To be given as `since` next time. None: no look could be kept, compare with the image."""
    created: int
    changed: int
    removed: int
    """A directory stands for all that went with it."""
    entries: tuple[FileChange, ...]
    """The first of them, in the order of their paths."""
    excluded: tuple[str, ...]
    """What is not looked at."""

    @property
    def total(self) -> int:
        """How many paths there are, those that `entries` leaves out included."""
        return self.created + self.changed + self.removed

    @property
    def left_out(self) -> int:
        """How many paths `entries` leaves out."""
        return self.total - len(self.entries)


class DiskExtension(_Model):
    """Room beside a sandbox's disk limit, for whoever judges what it has filled."""

    extra_bytes: int = Field(ge=0, le=256 * MIB)


class GuardRequest(_Model):
    """A directory that one command alone may write, and only by what nobody planted."""

    path: str
    """An existing directory; what lies there is out of sight meanwhile."""
    operation_id: str
    """Of the command; it is started after this."""
    names: tuple[str, ...]
    """Files in it that are vouched for."""
    owner: tuple[int, int] = (0, 0)
    size_bytes: int = Field(default=64 * MIB, ge=4096)
    trusted: tuple[str, ...] = ()
    """Paths whose files may be run as code by what writes the named files, whoever made them."""


class GuardedFile(_Model):
    """One of the named files, as it was when writing ended."""

    name: str
    kind: FileKind
    size: int
    nlink: int
    vouched: bool
    """No process wrote it that is not the command's, or that had run foreign code."""
    content: bytes
    """Of a regular file, at most 64 KiB and one byte."""


class GuardRefusal(_Model):
    """An attempt to write that failed. Texts are hostile."""

    at: float
    program: str
    name: str
    outsider: bool
    """It was not of the command."""
    cause: str
    """The foreign file that it had run as code; empty for an outsider."""


class GuardReport(_Model):
    """What was written, by whom it was tried, and whether foreign files were used at all."""

    files: tuple[GuardedFile, ...]
    displaced: tuple[str, ...]
    """Names under which a file was that could be vouched for, and another or none is now."""
    refused: tuple[GuardRefusal, ...]
    touched: str | None
    """The first foreign file that a process of the command opened."""
    lost: bool
    """More files were opened than could be judged, so nothing is vouched for."""
    cpu_s: float
    """What the whole sandbox has used since it was guarded."""
    forks_refused: int
    """Processes and threads that it was refused since, having as many as it may."""


# --- events ---------------------------------------------------------------------------


class EventKind(StrEnum):
    """What an event is about. Each kind is kept, and read by a cursor, apart from the others."""

    STATE = "state"
    """A sandbox has another state."""
    EGRESS = "egress"
    """A decision about what it asked of the network."""
    TAMPER = "tamper"
    """A refused attempt to write where a guard stood; told when the guard reports."""


class SandboxEvent(_Model):
    """Something that has happened to one sandbox."""

    cursor: str
    """What to ask with for what came after it."""
    at: float
    """Unix seconds."""
    sandbox_id: str
    kind: EventKind = EventKind.STATE
    state: SandboxState
    """Its state from then on."""
    version: int
    reason: str | None = None
    """Why it has this state."""
    egress: EgressEvent | None = None
    """Of an event of this kind."""
    tamper: GuardRefusal | None = None
    """Of an event of this kind."""
    trace_id: str | None = None
    """Of the request that caused it, else of the sandbox's create."""


class EventPage(_Model):
    """Events of one kind in order."""

    events: tuple[SandboxEvent, ...]
    next_cursor: str


class Fingerprint(_Model):
    """A digest of the sandbox's state by parts, and of all of them.

    `excluded` lists what is left out on purpose.
    """

    digest: str
    files: str
    processes: str
    ports: str
    users: str
    limits: str
    network: str
    excluded: tuple[str, ...]


class ImageInfo(_Model):
    """One named image of the node's store."""

    name: str
    digest: str
    layers: tuple[str, ...]
    """Digests, top first."""
    created_at: float
    size_bytes: int
    """Content of its layers, those shared with other images included."""


class PortUrl(_Model):
    """Where a browser, or any HTTP client, reaches one port of a sandbox without a key.

    Whoever has it may use it until it expires or the sandbox ends.
    """

    url: str
    expires_at: float
    """Unix seconds."""


class Capabilities(_Model):
    """What a runtime has probed, never what it hopes for."""

    runtime: str
    isolation: bool
    """Whether a hostile command is kept from the host."""
    limits: frozenset[str] = frozenset()
    """Of cpu, memory, pids, disk: those that are enforced."""
    pty: bool = False
    ports: bool = False
    users: bool = False
    egress: bool = False
    """Whether network policies can be enforced; else only the empty one is taken."""
    guards: bool = False
    """Whether a directory can be guarded (`SandboxHandle.guard`)."""
    storage: str = ""
    details: dict[str, Any] = Field(default_factory=dict)
