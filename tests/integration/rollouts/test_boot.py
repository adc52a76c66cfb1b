"""A task whose service is not there is a task that nobody can solve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldframe import AsyncSandboxClient
from coldframe.images.base import Healthcheck as ImageHealthcheck
from coldframe.images.base import Image, ImageConfig
from coldframe.images.store import ImageStore
from coldframe.rollouts.boot import EntryPointError, boot, entry_point
from coldframe.rollouts.healthcheck import UnhealthyError
from coldframe.rollouts.task import Healthcheck
from tests.integration.rollouts.conftest import RunAttempt
from tests.unit.rollouts.tasks import BASE, write_task

Tagged = Callable[..., str]
SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8123, bind='127.0.0.1')"
ASKED = Healthcheck(
    "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8123\")'",
    interval_s=0.2,
    start_period_s=30.0,
    start_interval_s=0.1,
)


@pytest.fixture
def tagged(image_store: ImageStore, debian_image: Image, tmp_path: Path) -> Iterator[Tagged]:
    """Name Debian's layers anew, with an entry point."""
    names: list[str] = []

    def tag(entrypoint: tuple[str, ...] = (), cmd: tuple[str, ...] = (), **rest: Any) -> str:
        name = f"test/boot-{tmp_path.name.replace('_', '-')[:40].lower()}-{len(names)}:1"
        config = ImageConfig(env=debian_image.config.env, entrypoint=entrypoint, cmd=cmd, **rest)
        names.append(name)
        return image_store.tag(name, debian_image.layers, config).name

    yield tag
    for name in names:
        image_store.remove(name)


@pytest.mark.parametrize(
    ("entrypoint", "cmd", "started"),
    [
        ((), (), ()),
        ((), ("bash",), ()),
        ((), ("/bin/bash", "-l"), ()),
        ((), ("/bin/sh", "-c", "bash"), ()),
        ((), ("python3.11",), ()),
        ((), ("python3", "-m", "http.server"), ("python3", "-m", "http.server")),
        ((), ("bash", "-c", "serve"), ("bash", "-c", "serve")),
        ((), ("/bin/sh", "-c", "serve --all"), ("/bin/sh", "-c", "serve --all")),
        ((), ("nginx",), ("nginx",)),
        (("/start",), ("bash",), ("/start", "bash")),
        (("bash",), (), ("bash",)),
    ],
)
def test_entry_point_with_cmd_is_what_a_container_would_start_but_no_idle_shell(
    entrypoint: tuple[str, ...], cmd: tuple[str, ...], started: tuple[str, ...]
) -> None:
    """Every base image has a shell as CMD; starting it changes the initial state for nothing."""
    assert entry_point(entrypoint, cmd, start_cmd=True) == started


@pytest.mark.parametrize("cmd", [(), ("bash",), ("python3", "app.py"), ("sleep", "infinity")])
def test_entry_point_without_cmd_idles_in_its_place(cmd: tuple[str, ...]) -> None:
    """A CMD that is the very program to repair must neither fail the start nor take its port."""
    assert entry_point((), cmd) == ()
    assert entry_point(("/start",), cmd) == ("/start", "sh", "-c", "sleep infinity")


@pytest.mark.root
async def test_entry_point_in_the_foreground_serves_until_the_sandbox_ends(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """It belongs to nobody's command, so nothing but the sandbox's end takes it away."""
    image = tagged(("python3", "-c", SERVER), workdir="/tmp")
    async with await native_async_client.create_sandbox(image) as sandbox:
        booted = await boot(sandbox, ASKED)
        await sandbox.exec("true")
        listed = await sandbox.processes()
        ports = await sandbox.listening_ports()

    assert booted.command[:3] == ("python3", "-c", SERVER)
    assert [one.operation_id for one in listed] == [booted.operation_id]
    assert ports == (8123,)
    assert booted.checks is not None


@pytest.mark.root
async def test_entry_point_that_leaves_a_daemon_and_ends_is_healthy(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """A container would end with it; what it daemonised is what the task needs."""
    image = tagged(
        ("/bin/sh", "-c", 'setsid python3 -c "$0" >/dev/null 2>&1 & exit 0', SERVER),
        workdir="/tmp",
    )
    async with await native_async_client.create_sandbox(image) as sandbox:
        await boot(sandbox, ASKED)

        assert await sandbox.listening_ports() == (8123,)


@pytest.mark.root
async def test_cmd_is_started_for_a_task_that_asks_for_it_and_for_no_other(
    tagged: Tagged, run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """As a container would, or as the format has it: two ways, and the task says which."""
    image = tagged(cmd=("python3", "-c", SERVER), workdir="/tmp")
    toml = BASE.replace("debian:bookworm", image)
    asks = f"#!/bin/sh\n{ASKED.command} && echo 1 > /logs/verifier/reward.txt\n"
    silent = asks.replace("&&", "||")
    started = toml + "[metadata.coldframe]\nstart_cmd = true\n"

    with_it = await run_attempt(write_task(tmp_path, "a", toml=started, tests__test_sh=asks))
    without = await run_attempt(write_task(tmp_path, "b", toml=toml, tests__test_sh=silent))

    assert (with_it.rewards, without.rewards) == ({"reward": 1.0}, {"reward": 1.0})


@pytest.mark.root
async def test_entry_point_runs_as_the_images_user_with_the_sandboxes_environment(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """As a container's would: env of the task included, stdin at its end."""
    image = tagged(
        ("/bin/sh", "-c", 'echo "$PLACE $(id -u) $(pwd) $(cat)" > /tmp/seen'),
        user="www-data",
        workdir="/var",
    )
    async with await native_async_client.create_sandbox(image, env={"PLACE": "here"}) as sandbox:
        await boot(sandbox, Healthcheck("test -s /tmp/seen", interval_s=0.1, retries=50))

        assert await sandbox.files.read("/tmp/seen") == b"here 33 /var \n"


@pytest.mark.root
async def test_entry_point_that_fails_ends_the_wait_and_shows_its_output(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """Waiting out the healthcheck would say nothing of why."""
    image = tagged(("/bin/sh", "-c", "echo no licence >&2; exit 4"))
    patient = Healthcheck("false", interval_s=60, start_period_s=600, start_interval_s=60)
    begun = time.monotonic()
    async with await native_async_client.create_sandbox(image) as sandbox:
        for check in (patient, None):
            with pytest.raises(EntryPointError, match=r"exit code 4.*no licence"):
                await boot(sandbox, check)

    assert time.monotonic() - begun < 50


@pytest.mark.root
async def test_entry_point_that_does_not_exist_is_named(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """The image is at fault, and says so at once."""
    async with await native_async_client.create_sandbox(tagged(("/no/such",))) as sandbox:
        with pytest.raises(EntryPointError, match="/no/such"):
            await boot(sandbox, None)


@pytest.mark.root
async def test_boot_waits_for_the_images_own_healthcheck_unless_the_task_has_one(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """As a container would be waited for; looking before its first interval costs no retry."""
    slow = 'sleep 0.6; touch /tmp/up; test "$(cat)"'
    asks = ("/bin/sh", "-c", "echo >> /tmp/asked; test -e /tmp/up")
    own = ImageHealthcheck(asks, interval_s=30.0, start_interval_s=0.1, retries=1)
    image = tagged(("/bin/sh", "-c", slow + "; exit 0"), healthcheck=own)
    async with await native_async_client.create_sandbox(image) as sandbox:
        booted = await boot(sandbox, None)
        other = await boot(sandbox, Healthcheck("exit 0"))

        assert booted.checks is not None and booted.checks > 2
        assert other.checks == 1
        assert len(await sandbox.files.read("/tmp/asked")) == booted.checks


@pytest.mark.root
async def test_boot_of_an_image_that_is_never_well_fails_by_its_own_healthcheck(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """The control: the image's timings are the ones that are kept."""
    own = ImageHealthcheck(("/bin/false",), interval_s=0.2, start_interval_s=0.05, retries=2)
    async with await native_async_client.create_sandbox(tagged(healthcheck=own)) as sandbox:
        with pytest.raises(UnhealthyError, match=r"'/bin/false': failed 2 times in a row"):
            await boot(sandbox, None)


@pytest.mark.root
async def test_boot_without_entry_point_checks_the_health_alone(
    tagged: Tagged, native_async_client: AsyncSandboxClient
) -> None:
    """A healthcheck of the task counts whatever the image starts."""
    async with await native_async_client.create_sandbox(tagged(cmd=("bash",))) as sandbox:
        with pytest.raises(UnhealthyError):
            await boot(sandbox, Healthcheck("false", interval_s=0.01))
        booted = await boot(sandbox, None)

        assert (booted.command, booted.checks) == ((), None)
        assert await sandbox.processes() == ()


@pytest.mark.root
async def test_attempt_whose_sandbox_is_not_there_in_time_is_the_starts_failure(
    run_attempt: RunAttempt,
    native_async_client: AsyncSandboxClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent's time does not cover a wedged start, so the start has one of its own."""
    monkeypatch.setattr("coldframe.rollouts.attempt.BOOT_S", 0.0)
    trajectory = await run_attempt(write_task(tmp_path))

    assert trajectory.failure is not None
    assert (trajectory.failure.code, trajectory.failure.side) == ("boot_deadline", "startup")
    assert trajectory.failure.retryable
    assert await native_async_client.list_sandboxes() == ()


@pytest.mark.root
async def test_attempt_whose_task_is_never_healthy_has_no_agent_and_no_reward(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """The control is every other attempt: a check that fails costs the start, not the policy."""
    toml = BASE + "[environment.healthcheck]\ncommand = 'echo no; false'\ninterval_sec = 0\n"
    trajectory = await run_attempt(write_task(tmp_path, toml=toml))

    assert trajectory.failure is not None
    assert (trajectory.failure.code, trajectory.failure.side) == ("unhealthy", "startup")
    assert (trajectory.steps, trajectory.rewards) == ((), None)


@pytest.mark.root
async def test_attempt_whose_skills_are_not_in_the_image_is_the_tasks_fault(
    run_attempt: RunAttempt, tmp_path: Path
) -> None:
    """Found by whatever runs it, so by `task check` too; the control's directory is there."""
    toml = BASE + 'skills_dir = "{}"\n'
    absent = await run_attempt(write_task(tmp_path, "a", toml=toml.format("/no/skills")))
    there = await run_attempt(write_task(tmp_path, "b", toml=toml.format("/usr/share")))

    assert absent.failure is not None
    assert (absent.failure.code, absent.failure.side) == ("task_refused", "caller")
    assert "/no/skills" in absent.failure.message
    assert there.rewards == {"reward": 1.0}
