"""What the checks of a runtime are written with: a laboratory that makes and ends sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coldframe.images.base import Image
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.ids import new_node_id, new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, ExecResult, OutputChunk, SandboxSpec, Stream
from coldframe.runtimes.base import FileAccess, RunningExec, Runtime, SandboxHandle

E = TypeVar("E", bound=BaseException)
EndSandbox = Callable[[SandboxHandle], Awaitable[None]]
"""Ends a sandbox from outside, as the OOM killer might: its pid 1 is killed."""

HOME = "/work"
"""Where commands of the checks run. Their paths are relative to it, so that a runtime that maps
nothing but the working directory can be checked too."""


class CheckFailedError(AssertionError):
    """The runtime does not do what the seam promises."""


class NotApplicableError(Exception):
    """This check cannot be made here; the message says why."""


def expect(holds: bool, otherwise: str) -> None:
    """Fail the check with a sentence unless something holds."""
    if not holds:
        raise CheckFailedError(otherwise)


def equal(actual: object, expected: object, what: str) -> None:
    """Fail the check unless two values are the same."""
    if actual != expected:
        raise CheckFailedError(f"{what}: {_short(actual)} instead of {_short(expected)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"


async def raises(kind: type[E], awaitable: Awaitable[object], what: str) -> E:
    """Fail the check unless awaiting raises this kind of error; return the error."""
    try:
        outcome = await awaitable
    except kind as error:
        return error
    except ColdframeError as error:
        got = type(error).__name__
        raise CheckFailedError(f"{what}: {got} ({error}) instead of {kind.__name__}") from error
    raise CheckFailedError(f"{what}: {_short(outcome)} instead of {kind.__name__}")


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return once something that only the sandbox can tell holds; the check's limit ends it."""
    while not await condition():  # noqa: ASYNC110 (no event tells what the sandbox does)
        await asyncio.sleep(0.01)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """Yield parts, as content for `FileAccess.write`."""
    for part in parts:
        yield part


@dataclass(frozen=True)
class Bench:
    """One sandbox under check."""

    handle: SandboxHandle

    @property
    def files(self) -> FileAccess:
        """Its files."""
        return self.handle.files

    async def start(self, command: str | None = None, **request: Any) -> RunningExec:
        """Start a command line (or `argv=`) in HOME."""
        request.setdefault("cwd", HOME)
        request.setdefault("deadline_s", 30.0)
        wanted = ExecRequest(command=command, **request)
        return await self.handle.start_exec(wanted, wanted.operation_id or new_operation_id())

    async def run(self, command: str | None = None, **request: Any) -> ExecResult:
        """Run a command line (or `argv=`) in HOME to its end."""
        running = await self.start(command, **request)
        return await running.wait()

    async def write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file in HOME."""
        await self.files.write(f"{HOME}/{name}", pieces(data), mode=mode)

    async def read(self, path: str | bytes, **span: int) -> bytes:
        """Read a file whole."""
        return b"".join([piece async for piece in self.files.read(path, **span)])

    async def has(self, name: str) -> bool:
        """Whether there is such a name in HOME."""
        return name.encode() in {entry.name for entry in await self.files.list(HOME)}

    async def process_names(self) -> list[str]:
        """Names of what runs, sorted."""
        return sorted(process.name for process in await self.handle.processes())


async def read_until(running: RunningExec, wanted: bytes, stream: Stream = "stdout") -> bytes:
    """Read a stream from its begin until `wanted` has come; fail if it ends before."""
    data = b""
    while wanted not in data:
        chunk = await running.read(stream, len(data), 1 << 16)
        data += chunk.data
        expect(bool(chunk.data) or not chunk.eof, f"{stream} ended with {_short(data)}")
    return data


async def read_all(running: RunningExec, stream: Stream = "stdout") -> list[OutputChunk]:
    """Read a stream from its begin to its end."""
    chunks: list[OutputChunk] = []
    while not chunks or not chunks[-1].eof:
        cursor = chunks[-1].next_cursor if chunks else 0
        chunks.append(await running.read(stream, cursor, 4096))
    return chunks


@dataclass
class Lab:
    """Makes sandboxes of one image on one runtime for one check."""

    runtime: Runtime
    image: Image
    end_sandbox: EndSandbox | None = None
    made: list[str] = field(default_factory=list)
    _node_id: str = field(default_factory=new_node_id)

    @asynccontextmanager
    async def sandbox(self, **spec: Any) -> AsyncIterator[Bench]:
        """Make a sandbox with HOME in it, and destroy it at the end of the block."""
        sandbox_id = new_sandbox_id(self._node_id)
        self.made.append(sandbox_id)
        spec.setdefault("memory_bytes", 256 << 20)
        wanted = SandboxSpec(image=self.image.name, **spec)
        handle = await self.runtime.create(sandbox_id, wanted, self.image)
        try:
            await handle.files.mkdir(HOME)
            yield Bench(handle)
        finally:
            await asyncio.shield(asyncio.ensure_future(handle.destroy()))


CheckFunction = Callable[[Lab], Awaitable[None]]


@dataclass(frozen=True)
class Check:
    """One promise of the seam."""

    name: str
    needs: frozenset[str]
    """Capabilities without which it does not apply: fields of `Capabilities` that are true,
    names in its `limits`, or `end_sandbox`."""
    run: CheckFunction


class Checks:
    """Collects functions into a table."""

    def __init__(self) -> None:
        self.table: list[Check] = []

    def __call__(self, *needs: str) -> Callable[[CheckFunction], CheckFunction]:
        """Decorate a check; its name is the function's."""

        def add(function: CheckFunction) -> CheckFunction:
            name = getattr(function, "__name__", str(function))
            self.table.append(Check(name, frozenset(needs), function))
            return function

        return add
