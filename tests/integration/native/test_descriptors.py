"""A process that has no descriptor left loses an answer, not a worker and all its sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldframe.protocol.errors import CapacityError, Execution
from tests.fixtures.descriptors import room_for
from tests.fixtures.native import Native

BIG = "head -c 300000 /dev/zero"


def count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("more", [0, 1], ids=["none", "half"])
async def test_end_without_room_fails_its_exec_alone(native: Native, more: int) -> None:
    """Every sandbox of the worker would be lost with its connection."""
    sandbox = await native.create()
    before = count()
    both = f"{BIG}; {BIG} >&2"
    with room_for(more):
        big = native.start(sandbox, "/bin/sh", "-c", both)
        small = native.start(sandbox, "/bin/echo", "there")
        with pytest.raises(CapacityError, match=r"RLIMIT_NOFILE is .*ulimit -n") as caught:
            await big.ended
        end = await small.ended

    assert caught.value.execution is Execution.EXECUTED
    assert end.stdout.data == b"there\n"
    assert native.lost == []
    assert count() == before
    again = await native.sh(sandbox, BIG)
    assert again.stdout.total == 300000
    again.close()
    assert count() == before


async def test_create_without_room_leaves_nothing(native: Native) -> None:
    """Its root went astray on the way, and nobody else could end it."""
    before = count()
    with (
        room_for(0),
        pytest.raises(CapacityError, match="descriptor left") as caught,
    ):
        await native.create()

    assert caught.value.execution is Execution.NOT_EXECUTED
    (stat,) = await native.spawner.stat()
    assert stat.sandboxes == 0
    assert native.cgroups() == []
    assert count() == before


async def test_terminal_without_room_says_that_the_command_was_executed(native: Native) -> None:
    """It must not be run again by whoever reads 'capacity'."""
    sandbox = await native.create()
    before = count()
    with room_for(0):
        execution = native.start(
            sandbox, "/bin/sh", "-c", "echo on; exit 3", pty=(24, 80), want_started=True
        )
        assert execution.started is not None
        with pytest.raises(CapacityError, match="terminal") as caught:
            await execution.started
        end = await execution.ended

    assert caught.value.execution is Execution.EXECUTED
    assert (end.code, end.stdout.data) == (3, b"on\r\n")
    assert count() == before


async def test_output_without_room_can_be_asked_for_again(native: Native) -> None:
    """The command goes on; only this look at it failed."""
    sandbox = await native.create()
    execution = native.start(sandbox, "/bin/sh", "-c", "echo there; sleep 30")
    with room_for(1), pytest.raises(CapacityError):
        await native.spawner.output(execution)

    spools = await native.spawner.output(execution)
    progress = await native.spawner.watch(execution, 0, 0)
    assert os.pread(spools.stdout_fd, 100, 0) == b"there\n"
    assert progress.stdout_total == 6
    os.close(spools.stdout_fd)
    os.close(spools.stderr_fd)
