"""Checks of a runtime: what it tells of changed files."""

from __future__ import annotations

import hashlib

from coldframe.protocol.errors import CapabilityError, NotKnownError
from coldframe.protocol.models import Change, FileChanges, FileKind
from coldframe.runtimes.self_check_lab import (
    Bench,
    Checks,
    Lab,
    NotApplicableError,
    equal,
    expect,
    raises,
)

check = Checks()


async def _changes(bench: Bench, since: str | None, most: int = 100) -> FileChanges:
    try:
        return await bench.handle.changes(since, most, 10.0)
    except CapabilityError as error:
        raise NotApplicableError(str(error)) from error


def _told(found: FileChanges) -> list[tuple[bytes, str, str]]:
    return [(one.path, one.change.value, one.kind.value) for one in found.entries]


async def _ran(bench: Bench, command: str) -> None:
    result = await bench.run(command)
    expect(result.ok, f"{command!r} failed: {result.stderr!r}")


@check()
async def changed_files_are_told(lab: Lab) -> None:
    """Created, changed and removed, each once, and only since the look before."""
    async with lab.sandbox() as bench:
        await _ran(bench, "mkdir kept gone; echo 1 > kept/same; echo 1 > kept/f; echo 1 > gone/f")
        first = await _changes(bench, None)
        expect(b"/work/kept/f" in {one.path for one in first.entries}, "a new file was not told")
        await _ran(bench, "echo 22 > kept/f; touch kept/same; rm -r gone; ln -s f kept/l")
        second = await _changes(bench, first.mark)
        equal(
            _told(second),
            [
                (b"/work/gone", "removed", "directory"),
                (b"/work/kept/f", "changed", "file"),
                (b"/work/kept/l", "created", "link"),
            ],
            "what changed",
        )
        equal((second.created, second.changed, second.removed), (1, 1, 1), "the numbers")
        file = second.entries[1]
        equal((file.size, file.sha256), (3, hashlib.sha256(b"22\n").hexdigest()), "what it holds")
        third = await _changes(bench, second.mark)
        equal(_told(third), [], "what changed while nothing did")
        equal(_told(await _changes(bench, first.mark)), _told(second), "asked for again")


@check()
async def change_of_mode_alone_is_told(lab: Lab) -> None:
    """A program that was made executable is not what it was."""
    async with lab.sandbox() as bench:
        await _ran(bench, "echo 1 > f")
        mark = (await _changes(bench, None)).mark
        await _ran(bench, "chmod 755 f")
        equal(_told(await _changes(bench, mark)), [(b"/work/f", "changed", "file")], "a new mode")


@check()
async def changes_of_any_name_are_told_and_bounded(lab: Lab) -> None:
    """Names are bytes; beyond the number asked for they are counted."""
    async with lab.sandbox() as bench:
        mark = (await _changes(bench, None)).mark
        odd = b"a\nb\xff"
        await bench.run(argv=("/bin/sh", "-c", b'echo x > "$1"; mkfifo pipe', "sh", odd))
        found = await _changes(bench, mark)
        equal(
            _told(found),
            [(b"/work/" + odd, "created", "file"), (b"/work/pipe", "created", "fifo")],
            "names",
        )
        await _ran(bench, "for n in 1 2 3 4 5 6 7 8 9; do : > n$n; done")
        found = await _changes(bench, found.mark, 3)
        equal((len(found.entries), found.created, found.left_out), (3, 9, 6), "what is bounded")
        expect({one.change for one in found.entries} == {Change.CREATED}, "all are new")
        expect({one.kind for one in found.entries} == {FileKind.FILE}, "all are files")


@check()
async def mark_that_is_not_kept_is_refused(lab: Lab) -> None:
    """Nothing is told that was compared with something else."""
    async with lab.sandbox() as bench:
        await _changes(bench, None)
        await raises(NotKnownError, bench.handle.changes("999", 10, 10.0), "an unknown mark")
