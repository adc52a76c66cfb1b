"""An agent that starts too early works on another task; one that never starts costs a night."""

from __future__ import annotations

import time

import pytest
import pytest_asyncio

from coldframe import AsyncSandbox, AsyncSandboxClient
from coldframe.protocol.errors import SandboxGoneError
from coldframe.rollouts.healthcheck import UnhealthyError, wait_healthy
from coldframe.rollouts.task import Healthcheck

pytestmark = pytest.mark.root

COUNT = "echo run >> /runs; "


@pytest_asyncio.fixture
async def sandbox(native_async_client: AsyncSandboxClient) -> AsyncSandbox:
    return await native_async_client.create_sandbox("debian:bookworm")


async def runs(sandbox: AsyncSandbox) -> int:
    return (await sandbox.files.read("/runs")).count(b"run\n")


async def test_healthcheck_that_succeeds_at_once_is_run_once(sandbox: AsyncSandbox) -> None:
    """A healthy sandbox pays for one command and no interval."""
    begun = time.monotonic()
    checks = await wait_healthy(sandbox, Healthcheck(COUNT + "true", interval_s=60))

    assert (checks, await runs(sandbox)) == (1, 1)
    assert time.monotonic() - begun < 50


async def test_healthcheck_fails_after_its_retries_and_shows_the_last_output(
    sandbox: AsyncSandbox,
) -> None:
    """The author must see what the check said, without running it by hand."""
    check = Healthcheck(COUNT + "echo no database >&2; exit 3", interval_s=0.05, retries=3)

    with pytest.raises(UnhealthyError, match=r"3 times in a row.*exit code 3.*no database"):
        await wait_healthy(sandbox, check)

    assert await runs(sandbox) == 3


async def test_healthcheck_failures_in_the_start_period_do_not_count(
    sandbox: AsyncSandbox,
) -> None:
    """A service that takes its time is no failure; without the period the same one is."""
    command = COUNT + "test $(wc -l < /runs) -gt 4"
    slow = Healthcheck(command, 60.0, start_period_s=30.0, start_interval_s=0.02, retries=1)

    checks = await wait_healthy(sandbox, slow)
    await sandbox.files.remove("/runs")

    assert checks == 5
    with pytest.raises(UnhealthyError):
        await wait_healthy(sandbox, Healthcheck(command, 0.02, retries=1))


async def test_healthcheck_that_began_in_the_start_period_does_not_count(
    sandbox: AsyncSandbox,
) -> None:
    """Whatever it takes: a check that hangs while a service starts is none of its failures."""
    check = Healthcheck(COUNT + "sleep 1; false", 0.02, start_period_s=0.5, retries=1)
    with pytest.raises(UnhealthyError, match="failed 1 times in a row"):
        await wait_healthy(sandbox, check)

    assert await runs(sandbox) == 2


async def test_healthcheck_past_its_start_period_waits_the_longer_interval(
    sandbox: AsyncSandbox,
) -> None:
    """The two intervals are two: hasty while it starts, patient later."""
    check = Healthcheck(COUNT + "false", 0.5, start_period_s=0.3, start_interval_s=0.05, retries=2)
    begun = time.monotonic()
    with pytest.raises(UnhealthyError):
        await wait_healthy(sandbox, check)

    assert time.monotonic() - begun >= 0.3 + 0.5
    assert await runs(sandbox) >= 3


async def test_healthcheck_past_its_timeout_is_killed_with_its_children(
    sandbox: AsyncSandbox,
) -> None:
    """A hanging check is a failed one, and must not pile up processes."""
    check = Healthcheck("sleep 1000 & sleep 1000", timeout_s=0.2, interval_s=0.01, retries=2)

    with pytest.raises(UnhealthyError, match=r"not done after 0\.2 s"):
        await wait_healthy(sandbox, check)

    assert await sandbox.processes() == ()


async def test_healthcheck_runs_as_its_user_with_the_sandboxes_environment(
    native_async_client: AsyncSandboxClient,
) -> None:
    """It asks on the agent's terms."""
    async with await native_async_client.create_sandbox(
        "debian:bookworm", env={"PLACE": "here"}, workdir="/tmp"
    ) as sandbox:
        check = Healthcheck('test "$PLACE $PWD $(id -u)" = "here /tmp 33"', retries=1)

        await wait_healthy(sandbox, check, user="www-data")
        with pytest.raises(UnhealthyError):
            await wait_healthy(sandbox, check)


async def test_healthcheck_of_a_sandbox_that_is_gone_is_no_unhealthy_one(
    native_async_client: AsyncSandboxClient,
) -> None:
    """The platform's failure must not be booked on the task."""
    sandbox = await native_async_client.create_sandbox("debian:bookworm")
    await sandbox.delete()

    with pytest.raises(SandboxGoneError):
        await wait_healthy(sandbox, Healthcheck("true"))


@pytest.mark.parametrize(("image", "healthy"), [("debian:bookworm", True), ("busybox", False)])
async def test_healthcheck_is_a_line_for_bash_where_the_image_has_it(
    native_async_client: AsyncSandboxClient, image: str, healthy: bool
) -> None:
    """Tasks are written for bash: in sh this very line would never be healthy."""
    check = Healthcheck('test "$BASH_VERSION" && [[ abc == a* ]]', retries=1)
    async with await native_async_client.create_sandbox(image) as sandbox:
        if healthy:
            await wait_healthy(sandbox, check)
        else:
            with pytest.raises(UnhealthyError):
                await wait_healthy(sandbox, check)
            await wait_healthy(sandbox, Healthcheck("true", retries=1))
