"""Which of Orchard's jobs can still be asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coldframe.integrations.orchard import jobs as room
from coldframe.integrations.orchard.jobs import Job, Jobs
from coldframe.integrations.orchard.words import Command
from coldframe.protocol.errors import OperationNotFoundError


class FakeTenant:
    """A caller on a node whose commands end when they are told to."""

    def __init__(self, owner: str) -> None:
        self.identity = SimpleNamespace(owner=owner, name=owner)
        self.node = self
        self.ends: dict[str, asyncio.Event] = {}

    def sandbox(self, sandbox_id: str) -> str:
        """Every sandbox is there."""
        return sandbox_id

    def operation(self, operation_id: str) -> str:
        """Ids stay as they are."""
        return operation_id

    async def exec(self, sandbox_id: str, request: Any) -> None:
        """Run until `ends` says that it is over."""
        await self.ends.setdefault(request.argv[-1], asyncio.Event()).wait()


def fake_tenant(owner: str) -> Any:
    """Return one that stands for a Tenant of a service."""
    return FakeTenant(owner)


async def run(jobs: Jobs, tenant: Any, name: str) -> Job:
    """Have a job run to its end."""
    job = await jobs.submit(tenant, "box", Command(command=[name]))
    await end(tenant, job)
    return job


async def end(tenant: FakeTenant, job: Job) -> None:
    """End a job that runs."""
    tenant.ends.setdefault(job.command, asyncio.Event()).set()
    await job.over.wait()


async def test_job_that_ran_for_long_can_be_asked_for_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted from its begin, the result of a long command would be gone before anybody asks."""
    jobs, tenant = Jobs(), fake_tenant("a")
    now = 1000.0
    monkeypatch.setattr(room.time, "time", lambda: now)
    long: Any = await jobs.submit(tenant, "box", Command(command=["long"]))
    now += room.KEPT_S + 1
    short = await run(jobs, tenant, "short")
    await end(tenant, long)
    now += room.KEPT_S - 1
    await run(jobs, tenant, "another")
    assert jobs.get(tenant, long.id) is long
    assert jobs.get(tenant, short.id) is short

    now += 2
    await run(jobs, tenant, "last")
    for job in (long, short):
        with pytest.raises(OperationNotFoundError):
            jobs.get(tenant, job.id)


async def test_many_jobs_of_one_owner_put_away_neither_what_runs_nor_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They did: the oldest went, whoever they belonged to, while they ran."""
    monkeypatch.setattr(room, "_MOST", 2)
    jobs, many, other = Jobs(), fake_tenant("many"), fake_tenant("other")
    running = await jobs.submit(many, "box", Command(command=["running"]))
    anothers = await run(jobs, other, "anothers")
    ended = [await run(jobs, many, str(number)) for number in range(4)]
    await run(jobs, other, "next")

    assert jobs.get(many, running.id) is running
    assert jobs.get(other, anothers.id) is anothers
    with pytest.raises(OperationNotFoundError):
        jobs.get(many, ended[0].id)
    assert jobs.get(many, ended[-1].id) is ended[-1]
    await end(many, running)
