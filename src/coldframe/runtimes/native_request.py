"""Turn a request into what the spawner runs."""

from __future__ import annotations

from dataclasses import dataclass

from coldframe.host.roottree import RootTree
from coldframe.host.spawner import ExecSpec, Keep
from coldframe.host.users import User, Users
from coldframe.images.base import Image
from coldframe.protocol.errors import (
    InvalidRequestError,
    UserNotFoundError,
)
from coldframe.protocol.models import Argument, ExecRequest, SandboxSpec
from coldframe.protocol.text import encoded, excerpt

DEFAULT_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INLINE_BYTES = 64 << 10
_Environment = tuple[tuple[bytes, ...], dict[Argument, Argument]]
"""What a command gets, `NAME=value` each, and the same as its request shows it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request with everything filled in, and the same for the spawner."""

    request: ExecRequest
    argv: list[bytes]
    env: tuple[bytes, ...]
    cwd: bytes
    user: User

    @classmethod
    def of(cls, filled: ExecRequest) -> Plan:
        """The plan of a command that was asked for already, as far as its end needs it."""
        if filled.command is not None:
            argv = [encode(filled.shell, "shell"), b"-c", encode(filled.command, "the command")]
        else:
            argv = [encode(argument, "an argument") for argument in filled.argv or ()]
        return cls(filled, argv, (), encode(filled.cwd or "/", "cwd"), User(0, 0))

    def spec(
        self,
        sandbox_id: str,
        *,
        stdin: int | None = None,
        status: int | None = None,
        want_started: bool = False,
        out_of_reach: bool = False,
        keep: Keep | None = None,
        keep_stdin: int | None = None,
    ) -> ExecSpec:
        """What the spawner is asked for."""
        request, user = self.request, self.user
        pty = request.pty
        return ExecSpec(
            sandbox_id,
            self.argv,
            self.env,
            self.cwd,
            user.uid,
            user.gid,
            user.groups,
            deadline_s=request.deadline_s,
            spool_bytes=request.spool_bytes,
            inline_bytes=min(_INLINE_BYTES, request.spool_bytes),
            kill_bytes=request.kill_bytes,
            pty=None if pty is None else (pty.rows, pty.cols),
            stdin=stdin,
            status=status,
            want_started=want_started,
            out_of_reach=out_of_reach,
            keep=keep,
            keep_stdin=keep_stdin,
        )


class Planner:
    """Knows one sandbox's defaults: its image's and its spec's."""

    def __init__(self, image: Image, spec: SandboxSpec, *, fresh: bool = True) -> None:
        """Raises InvalidRequestError for an environment or workdir that no command can have.

        `fresh`: nothing has run in the sandbox, whose files are still the image's.
        """
        self._users = Users(image.digest if fresh else "")
        self._user: str | int = image.config.user or "0" if spec.user is None else spec.user
        self._cwd = encode(spec.workdir or image.config.workdir or "/", "workdir")
        _require_absolute(self._cwd, "workdir")
        self._env: dict[bytes, bytes] = {}
        for name, value in (*image.config.env, *spec.env.items()):
            self._env[encode_name(name)] = encode(value, f"the value of {name!r}")
        self._usual: tuple[User, _Environment] | None = None
        """The environment of a user's commands that ask for none of their own."""

    def default_owner(self, tree: RootTree) -> tuple[int, int]:
        """The ids of the sandbox's default user; root's if the image does not know it."""
        try:
            user = self._users.resolve(tree, self._user)
        except UserNotFoundError:
            return 0, 0
        return user.uid, user.gid

    def plan(self, tree: RootTree, request: ExecRequest) -> Plan:
        """Fill in shell, cwd, user and environment.

        Raises UserNotFoundError, InvalidRequestError.
        """
        wanted = self._user if request.user is None else request.user
        user = self._users.resolve(tree, wanted)
        env, shown = self._environment(request, user)
        if request.cwd is None:
            cwd = self._cwd
        else:
            cwd = encode(request.cwd, "cwd")
            _require_absolute(cwd, "cwd")
        if request.command is not None:
            argv = [encode(request.shell, "shell"), b"-c", encode(request.command, "the command")]
        else:
            argv = [encode(argument, "an argument") for argument in request.argv or ()]
        filled = request.model_copy(
            update={"cwd": _readable(cwd), "env": dict(shown), "user": wanted}
        )
        return Plan(filled, argv, env, cwd, user)

    def _environment(self, request: ExecRequest, user: User) -> _Environment:
        if request.env or request.pty is not None:
            return _with_shown(self._merged(request, user))
        if self._usual is None or self._usual[0] is not user:
            self._usual = user, _with_shown(self._merged(request, user))
        return self._usual[1]

    def _merged(self, request: ExecRequest, user: User) -> dict[bytes, bytes]:
        env = {b"PATH": DEFAULT_PATH, b"HOME": user.home.encode("utf-8", "surrogateescape")}
        if user.name is not None:
            env[b"USER"] = user.name.encode("utf-8", "surrogateescape")
        env.update(self._env)
        if request.pty is not None:
            env.setdefault(b"TERM", b"xterm-256color")
        for name, value in request.env.items():
            key = encode_name(name)
            if value is None:
                env.pop(key, None)
            else:
                env[key] = encode(value, f"the value of {name!r}")
        return env


def _with_shown(env: dict[bytes, bytes]) -> _Environment:
    entries = tuple(b"=".join(one) for one in env.items())
    return entries, {_readable(name): _readable(value) for name, value in env.items()}


def encode(argument: Argument, what: str) -> bytes:
    """Text as UTF-8 with surrogate escapes, bytes as they are. Refuses a NUL."""
    raw = encoded(argument, what)
    if b"\0" in raw:
        raise InvalidRequestError(f"{what} holds a NUL: {raw[:80]!r}")
    return raw


def encode_name(name: Argument) -> bytes:
    """A name that an environment can hold."""
    raw = encode(name, "an environment name")
    if not raw or b"=" in raw:
        raise InvalidRequestError(f"environment name {excerpt(name)} is empty or holds '='")
    return raw


def _require_absolute(path: bytes, what: str) -> None:
    if not path.startswith(b"/"):
        raise InvalidRequestError(f"{what} {excerpt(path)} is not absolute")


def _readable(raw: bytes) -> Argument:
    """Text where it is text: what is not UTF-8 stays bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
