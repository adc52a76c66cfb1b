"""Checks of a runtime: guarded directories."""

from __future__ import annotations

from coldframe.protocol.errors import CapabilityError, ConflictError
from coldframe.protocol.models import ExecRequest, ExecResult, GuardReport, GuardRequest
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

_REQUEST = GuardRequest(path="/guarded", operation_id="op-guarded", names=("word",))


async def _guarded(bench: Bench, line: str) -> tuple[ExecResult, GuardReport]:
    """Run a command line as the one that may write, and tell what became of it."""
    await bench.handle.guard(_REQUEST)
    running = await bench.handle.start_exec(
        ExecRequest(command=line, user=0), _REQUEST.operation_id
    )
    return await running.wait(), await bench.handle.guard_report()


@check()
async def directory_that_cannot_be_guarded_is_refused(lab: Lab) -> None:
    """A verdict that counts on a guard must not be taken without."""
    async with lab.sandbox() as bench:
        await raises(ConflictError, bench.handle.guard_report(), "a report without a guard")
        await bench.handle.unguard()
        if lab.runtime.capabilities().guards:
            raise NotApplicableError("this runtime can guard directories")
        await raises(CapabilityError, bench.handle.guard(_REQUEST), "guarding one")


@check("guards")
async def guarded_directory_is_written_by_its_command_alone(lab: Lab) -> None:
    """Whatever else runs there as root: it cannot speak in the command's name."""
    async with lab.sandbox() as bench:
        await bench.run("mkdir /guarded; echo before > /guarded/word")
        await bench.run(
            "(while :; do echo planted > /guarded/word; sleep 0.01; done) > /dev/null 2>&1 &"
        )
        ended, report = await _guarded(bench, "sleep 0.1; echo mine > /guarded/word; sleep 0.1")
        late = await bench.run("echo late > /guarded/word")
        await bench.handle.unguard()

        expect(ended.ok, f"the command failed: {ended.stderr!r}")
        equal([(one.name, one.vouched, one.content) for one in report.files],
              [("word", True, b"mine\n")], "what was written")  # fmt: skip
        expect(bool(report.refused), "nobody was refused")
        equal({one.outsider for one in report.refused}, {True}, "who was refused")
        expect(not late.ok, "it could be written after the report")
        expect((await bench.run("cat /guarded/word")).ok, "what was there before is gone")


@check("guards")
async def code_that_was_there_before_may_not_write_the_named_files(lab: Lab) -> None:
    """What a command runs of others' making must not speak in its name."""
    async with lab.sandbox() as bench:
        await bench.run("mkdir /guarded; echo 'echo planted > /guarded/word' > /script")
        ended, report = await _guarded(
            bench, "sh /script; echo mine > /guarded/word; echo x >> /guarded/log"
        )

        expect(ended.ok, f"the command failed: {ended.stderr!r}")
        equal([(one.vouched, one.content) for one in report.files], [(True, b"mine\n")], "written")
        equal({one.cause for one in report.refused}, {"/script"}, "why it was refused")
        equal(report.touched, "/script", "what was used")
