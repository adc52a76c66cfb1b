"""Users are those of the sandbox itself: its own passwd, its own range of ids."""

from __future__ import annotations

import asyncio

import pytest

from coldframe.protocol.errors import (
    UserNotFoundError,
)
from coldframe.runtimes.native_sandbox import NativeSandbox
from tests.fixtures.runtime import MakeSandbox, pieces, run


async def test_user_is_of_the_sandboxes_own_passwd_and_changes_with_it(
    native_sandbox: NativeSandbox,
) -> None:
    """An image's user may be added by a command; ids need no entry."""
    with pytest.raises(UserNotFoundError):
        await run(native_sandbox, "id", user="agent")
    setup = (
        "echo agent:x:1234:1235::/home/agent:/bin/sh >> /etc/passwd;"
        "printf 'agent:x:1235:\\nextra:x:77:agent\\n' >> /etc/group"
    )
    assert (await run(native_sandbox, setup)).ok

    result = await run(native_sandbox, "id -u; id -g; id -G; echo $HOME $USER", user="agent")
    assert result.stdout == b"1234\n1235\n1235 77\n/home/agent agent\n"
    result = await run(native_sandbox, "id -u; id -g; echo $HOME", user="4321:33")
    assert result.stdout == b"4321\n33\n/\n"
    assert (await run(native_sandbox, "rm /etc/passwd /etc/group")).ok
    assert (await run(native_sandbox, "id -u", user=5)).stdout == b"5\n"


async def test_passwd_that_is_a_fifo_or_huge_does_not_block_or_fill_us(
    native_sandbox: NativeSandbox,
) -> None:
    """It is read on every command."""
    assert (await run(native_sandbox, "rm /etc/passwd; mkfifo /etc/passwd")).ok
    assert (await asyncio.wait_for(run(native_sandbox, "true"), 10)).ok
    with pytest.raises(UserNotFoundError):
        await asyncio.wait_for(run(native_sandbox, "true", user="nobody"), 60)
    await native_sandbox.files.remove("/etc/passwd")
    await native_sandbox.files.write("/etc/passwd", pieces(*[b"x:" * (1 << 20)] * 4))
    assert (await run(native_sandbox, "true")).ok
    with pytest.raises(UserNotFoundError):
        await run(native_sandbox, "true", user="nobody")
    await native_sandbox.files.remove("/etc/passwd")
    assert (await run(native_sandbox, "true")).ok


async def test_users_of_one_sandbox_are_not_those_of_another(make_sandbox: MakeSandbox) -> None:
    """What lies in the image is read once for all; what is written is the writer's alone."""
    one, other = await make_sandbox(), await make_sandbox()
    for sandbox in (one, other):
        assert (await run(sandbox, "id -u", user="root")).stdout == b"0\n"

    await run(one, "echo late:x:5:6::/:/bin/sh >> /etc/passwd")

    assert (await run(one, "id -u", user="late")).stdout == b"5\n"
    with pytest.raises(UserNotFoundError):
        await run(other, "id -u", user="late")
    third = await make_sandbox()
    with pytest.raises(UserNotFoundError):
        await run(third, "id -u", user="late")
