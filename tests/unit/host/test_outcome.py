"""Results for which tasks wait without owning them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coldframe.host.outcome import Outcome, Undertaking


async def _waiting(outcome: Outcome[int]) -> asyncio.Task[int]:
    """A task that waits for an outcome already."""

    async def wait() -> int:
        return await outcome

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_waiter_that_is_cancelled_leaves_the_outcome_to_the_others() -> None:
    """A caller that goes away must not end a command for those that wait for it too."""
    outcome: Outcome[int] = Outcome()
    leaving, staying = await _waiting(outcome), await _waiting(outcome)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not outcome.done()

    outcome.set_result(7)
    assert (await staying, await outcome, outcome.result()) == (7, 7, 7)


async def test_waiter_goes_on_in_the_next_turn_of_the_loop() -> None:
    """That is what it is for: two turns more are a tenth of a short command."""
    outcome: Outcome[int] = Outcome()
    task = await _waiting(outcome)
    outcome.set_result(7)
    await asyncio.sleep(0)
    assert task.done()


async def test_error_reaches_everyone_who_waits_and_nobody_need_ask(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio's futures complain of errors that nobody asked for."""
    outcome: Outcome[int] = Outcome()
    waiting = [await _waiting(outcome) for _ in range(2)]
    outcome.set_exception(ValueError("broken"))
    for task in waiting:
        with pytest.raises(ValueError, match="broken"):
            await task
    assert isinstance(outcome.exception(), ValueError)
    del outcome
    assert caplog.records == []


async def test_outcome_is_told_once_and_not_before_it_is_known() -> None:
    """A second answer to one question is a fault of the protocol."""
    outcome: Outcome[int] = Outcome()
    with pytest.raises(asyncio.InvalidStateError):
        outcome.result()
    outcome.set_result(7)
    with pytest.raises(asyncio.InvalidStateError):
        outcome.set_result(8)


async def test_callbacks_come_before_waiters_go_on_and_none_keeps_another_out() -> None:
    """Who waited for a command must find it counted as ended."""
    outcome: Outcome[int] = Outcome()
    task = await _waiting(outcome)
    seen: list[Any] = []
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(_: Outcome[int]) -> None:
        raise RuntimeError("in a callback")

    outcome.then(fail)
    outcome.then(lambda one: seen.append((one.result(), task.done())))
    outcome.set_result(7)
    outcome.then(lambda one: seen.append("late"))

    assert seen == [(7, False), "late"]
    assert [str(context["exception"]) for context in reported] == ["in a callback"]
    assert await task == 7


async def test_undertaking_goes_on_when_who_waits_is_cancelled() -> None:
    """A create cannot be stopped halfway."""
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    undertaking = Undertaking(work())
    waiting = await _waiting(undertaking)
    waiting.cancel()
    await asyncio.wait([waiting])
    gate.set()
    assert await undertaking == 7
    assert not undertaking.cancelled()


@pytest.mark.parametrize("waits", [False, True])
async def test_undertaking_begins_at_once_if_asked_to(waits: bool) -> None:
    """A turn of the event loop is a tenth of a short command."""
    gate = asyncio.Event()
    if not waits:
        gate.set()

    async def work() -> int:
        await gate.wait()
        return 7

    undertaking = Undertaking(work(), at_once=True)
    assert undertaking.done() is not waits
    gate.set()
    assert await undertaking == 7
    await undertaking.task


async def test_undertaking_that_fails_at_once_fails_whoever_waits_not_its_maker() -> None:
    """Its maker has to note it first."""

    async def work() -> int:
        raise ValueError("broken")

    undertaking = Undertaking(work(), at_once=True)
    with pytest.raises(ValueError, match="broken"):
        await undertaking
    await undertaking.task


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_undertaking_that_is_cancelled_tells_so_however_early(
    begun: bool, at_once: bool
) -> None:
    """A task that is cancelled before its first step runs nothing of what would tell."""
    stopped = []

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return 7

    undertaking = Undertaking(work(), at_once=at_once)
    waiting = asyncio.ensure_future(_waiting(undertaking))
    if begun:
        await asyncio.sleep(0)
    undertaking.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await undertaking
    assert bool(stopped) is (begun or at_once)
    assert undertaking.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await (await waiting)
