"""What a spawner's fault means to whoever asked: one typed error each, one clear sentence."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from coldframe.host.spawner import SpawnerFault
from coldframe.protocol.errors import (
    ArgumentsTooLongError,
    CapabilityError,
    CapacityError,
    ColdframeError,
    CreateError,
    NotExecutedError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    SandboxGoneError,
    ShellNotFoundError,
    SpawnerLostError,
    StorageFullError,
    WorkdirNotFoundError,
)
from coldframe.protocol.text import excerpt
from coldframe.runtimes.native_request import Plan

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_OWN_LIMITS = frozenset({errno.EAGAIN, errno.ENOMEM})
"""What a command fails to start with where the sandbox is at its limit of processes or memory."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EUSERS})
_NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR})


def exec_error(fault: SpawnerFault, plan: Plan) -> ColdframeError:
    """What a command that was never executed failed with."""
    if fault.stage == "cwd":
        text = os.strerror(fault.errno)
        return WorkdirNotFoundError(f"working directory {excerpt(plan.cwd)}: {text}")
    if fault.errno in _OWN_LIMITS:
        # The sandbox's own doing, or it may be: whoever fills it must not pass for a busy node.
        return NotExecutedError(
            "the command was not executed: the sandbox has as many processes or as much memory as "
            f"it may ({fault}); kill some of its processes"
        )
    if fault.stage in {"program", "interpreter"} or fault.errno == errno.E2BIG:
        return _program_error(fault, plan)
    if fault.stage == "terminal" and fault.errno in _FULL:
        return CapacityError(
            "the command was not executed: no terminal is free; end what holds those of the sandbox"
        )
    if fault.stage == "launch":
        return NotExecutedError(
            "the command was not executed: the sandbox is so busy, or stops what starts in it, that"
            f" it did not get there in time ({fault}); kill some of its processes"
        )
    return _by_errno(fault, NotExecutedError)(f"the command was not executed: {fault}")


def _by_errno(fault: SpawnerFault, otherwise: type[ColdframeError]) -> type[ColdframeError]:
    if fault.errno in _FULL:
        return StorageFullError
    if fault.errno in _EXHAUSTED:
        return CapacityError
    if fault.errno in {errno.ENOSYS, errno.EOPNOTSUPP}:
        return CapabilityError
    return SandboxGoneError if fault.stage == "sandbox" else otherwise


def _program_error(fault: SpawnerFault, plan: Plan) -> ColdframeError:
    number, program = fault.errno, os.fsdecode(plan.argv[0])[:200]
    text = os.strerror(number)
    if number == errno.E2BIG:
        return ArgumentsTooLongError(f"arguments and environment of {excerpt(program)}: {text}")
    if number in _EXHAUSTED:
        return CapacityError(f"program {excerpt(program)} was not executed: {text}")
    if fault.stage == "interpreter":
        return ProgramNotExecutableError(f"the interpreter of program {excerpt(program)}: {text}")
    if number not in _NOT_FOUND:
        return ProgramNotExecutableError(f"program {excerpt(program)} cannot be executed: {text}")
    if plan.request.command is not None:
        return ShellNotFoundError(
            f"the sandbox has no shell {excerpt(program)}; name another one or pass argv"
        )
    return ProgramNotFoundError(f"no program {excerpt(program)} in the sandbox or on its PATH")


@contextlib.contextmanager
def typed_question(sandbox_id: str, what: str) -> Iterator[None]:
    """Raise what `what` of a sandbox failed with: its end, unless there was but no room to do it.

    Raises:
        CapacityError, SandboxGoneError: for what a spawner raises when asked.
    """
    try:
        yield
    except SpawnerFault as fault:
        if fault.errno in _EXHAUSTED or fault.errno == errno.EBUSY:
            raise CapacityError(f"sandbox {sandbox_id!r}: {what}: {fault}") from fault
        raise SandboxGoneError(f"sandbox {sandbox_id!r} has ended: {what}: {fault}") from fault
    except SpawnerLostError as error:
        raise SandboxGoneError(f"sandbox {sandbox_id!r} has ended: {what}: {error}") from error


def create_error(fault: SpawnerFault, sandbox_id: str) -> ColdframeError:
    """What a sandbox that was not made failed with. Nothing of it is left."""
    return _by_errno(fault, CreateError)(f"sandbox {sandbox_id!r} was not made: {fault}")
