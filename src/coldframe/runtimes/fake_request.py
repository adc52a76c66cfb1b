"""What a request of a command comes to in the fake runtime, and what it failed with."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coldframe.images.base import Image
from coldframe.protocol.errors import (
    ArgumentsTooLongError,
    CapabilityError,
    InvalidRequestError,
    NotExecutedError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    ShellNotFoundError,
    UserNotFoundError,
    WorkdirNotFoundError,
)
from coldframe.protocol.models import Argument, ExecRequest, SandboxSpec
from coldframe.protocol.text import encoded, excerpt
from coldframe.runtimes import fake_zygote

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Plan:
    """A request with everything filled in, and what the kernel needs to run it."""

    request: ExecRequest
    argv: list[bytes]
    env: dict[bytes, bytes]
    paths: list[bytes]
    """Host paths to try, in order."""
    cwd: bytes


def _encode(argument: Argument, what: str) -> bytes:
    raw = encoded(argument, what)
    if b"\0" in raw:
        raise InvalidRequestError(f"{what} holds a NUL byte: {raw[:80]!r}")
    return raw


def require_plannable(image: Image, spec: SandboxSpec) -> None:
    """Refuse an environment or workdir that no command can have. Raises InvalidRequestError."""
    _merge_env(dict(image.config.env), spec.env)
    workdir = workdir_of(image, spec)
    _require_absolute(_encode(workdir, "workdir"), "workdir")
    if ".." in Path(workdir).parts:
        raise InvalidRequestError(f"workdir {excerpt(workdir)} holds '..'")


def workdir_of(image: Image, spec: SandboxSpec) -> str:
    """Where commands start that do not say it."""
    return spec.workdir or image.config.workdir or "/"


def _require_absolute(path: bytes, what: str) -> None:
    if not path.startswith(b"/"):
        raise InvalidRequestError(f"{what} {excerpt(path)} is not absolute")


def _merge_env(
    *layers: Mapping[str, str] | Mapping[Argument, Argument | None],
) -> dict[bytes, bytes]:
    merged: dict[bytes, bytes] = {}
    for layer in layers:
        for key, value in layer.items():
            name = _encode(key, "an environment name")
            if not name or b"=" in name:
                raise InvalidRequestError(f"environment name {excerpt(key)} is empty or holds '='")
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = _encode(value, f"the value of {key!r}")
    return merged


class Planner:
    """Plans the commands of one sandbox."""

    def __init__(self, directory: Path, image: Image, spec: SandboxSpec) -> None:
        """`directory` is the sandbox's."""
        self._directory, self._image, self._spec = directory, image, spec

    def plan(self, request: ExecRequest) -> Plan:
        """Fill a request in. Raises InvalidRequestError, UserNotFoundError, CapabilityError."""
        self._check_user(request)
        usual = {"PATH": DEFAULT_PATH, "HOME": str(self._directory / "root")}
        env = _merge_env(usual, dict(self._image.config.env), self._spec.env, request.env)
        if request.command is not None:
            argv = [os.fsencode(request.shell), b"-c", _encode(request.command, "the command")]
        else:
            argv = [_encode(argument, "an argument") for argument in request.argv or ()]
        workdir = workdir_of(self._image, self._spec)
        cwd = _encode(workdir if request.cwd is None else request.cwd, "cwd")
        _require_absolute(cwd, "cwd")
        normalised = request.model_copy(
            update={
                "cwd": os.fsdecode(cwd),
                "env": {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()},
                "user": request.user if request.user is not None else self._spec.user or "root",
            }
        )
        return Plan(normalised, argv, env, self._candidates(argv[0], env), cwd)

    def _check_user(self, request: ExecRequest) -> None:
        """Users are looked up like anywhere else, but only our own can be had."""
        user = request.user if request.user is not None else self._spec.user
        name = str(user if user is not None else "root").partition(":")[0]
        if name in {"root", "0"}:
            return
        passwd = (self._directory / "etc/passwd").read_text(errors="replace").splitlines()
        known = [line.split(":") for line in passwd if line.count(":") >= 3]
        if not name.isdigit() and all(fields[0] != name for fields in known):
            raise UserNotFoundError(f"user {excerpt(name)} is not in the sandbox's /etc/passwd")
        raise CapabilityError(
            f"the fake runtime runs commands as its own user only, not as {excerpt(name)}; "
            "use the native runtime"
        )

    def _candidates(self, program: bytes, env: Mapping[bytes, bytes]) -> list[bytes]:
        root = os.fsencode(self._directory)
        if b"/" not in program:
            directories = [entry for entry in env.get(b"PATH", b"").split(b":") if entry]
            return [os.path.join(entry, program) for entry in directories]  # noqa: PTH118 (bytes)
        if program.startswith(b"/"):
            return [root + program, program]
        return [program]

    def error(self, plan: Plan, stage: int, number: int) -> NotExecutedError:
        """Say why a planned command was not executed."""
        program = os.fsdecode(plan.argv[0])[:200]
        text = os.strerror(number)
        if stage == fake_zygote.STAGE_CWD:
            cwd = excerpt(plan.request.cwd or "/")
            return WorkdirNotFoundError(f"working directory {cwd}: {text}")
        if number == errno.E2BIG:
            return ArgumentsTooLongError(f"arguments and environment of {excerpt(program)}: {text}")
        if number in (errno.ENOENT, errno.ENOTDIR) and not self._has_program(plan):
            if plan.request.command is not None:
                return ShellNotFoundError(
                    f"no shell {excerpt(program)} in the sandbox; pass argv instead"
                )
            return ProgramNotFoundError(
                f"no program {excerpt(program)} in the sandbox or on its PATH"
            )
        return ProgramNotExecutableError(f"program {excerpt(program)} cannot be executed: {text}")

    def _has_program(self, plan: Plan) -> bool:
        """Whether any of the paths that were tried is there; relative ones lie below cwd."""
        below = self._directory / os.fsdecode(plan.cwd).lstrip("/")
        return any((below / os.fsdecode(path)).exists() for path in plan.paths)
