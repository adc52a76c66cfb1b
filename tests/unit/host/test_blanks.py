"""When blanks are made, over a spawner that makes nothing. What they are: integration tests."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from typing import cast

import pytest

from coldframe.host import blanks as module
from coldframe.host.blanks import Blanks
from coldframe.host.idranges import IdRanges
from coldframe.host.spawner import Place, Spawner, SpawnerFault
from tests.fixtures.waiting import until

LONG_S, SHORT_S = 30.0, 0.001


class FakeSpawner:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.destroyed: list[str] = []
        self.fault: SpawnerFault | None = None

    async def prepare(self, sandbox_id: str, id_base: int) -> Place:
        self.made.append(sandbox_id)
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return Place(1, 2)

    async def destroy(self, sandbox_id: str) -> None:
        self.destroyed.append(sandbox_id)


class Stock:
    """Blanks over the fake, at most two."""

    def __init__(self, directory: Path) -> None:
        self.spawner, self.ids = FakeSpawner(), IdRanges(directory)
        self.blanks = Blanks(
            "abc123", self.ids, lambda: cast("Spawner", self.spawner), self.reap, wanted=2
        )

    async def reap(self, sandbox_id: str) -> None:
        raise AssertionError(f"{sandbox_id} was known to its spawner")

    async def until(self, ready: int) -> None:
        await until(lambda: self.blanks.ready == ready)


@pytest.fixture
async def stock(tmp_path: Path) -> Stock:
    return Stock(tmp_path / "ids")


async def _pass(seconds: float = 0.05) -> None:
    await asyncio.sleep(seconds)


async def test_blank_waits_for_the_first_command_and_not_for_ever(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made beside that command it would hold it up; without any command it must come as well."""
    monkeypatch.setattr(module, "_PATIENCE_S", LONG_S)
    stock.blanks.command_ended()
    stock.blanks.create_noted()
    await _pass()
    assert stock.spawner.made == []

    stock.blanks.command_ended()
    await stock.until(2)

    stock.blanks.offer()
    monkeypatch.setattr(module, "_PATIENCE_S", SHORT_S)
    stock.blanks.create_noted()
    await _pass()
    assert stock.blanks.ready == 1  # what is offered is still there
    await stock.blanks.close()
    assert sorted(stock.spawner.destroyed) == sorted(stock.spawner.made)


async def test_creates_in_a_row_put_blanks_off(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst has no use for a worker that makes something else."""
    monkeypatch.setattr(module, "_PATIENCE_S", 1.0)
    began = time.monotonic()
    while time.monotonic() < began + 1.2:
        stock.blanks.create_noted()
        await _pass(0.02)
    assert stock.spawner.made == []
    await stock.until(2)


async def test_no_more_blanks_than_wanted_whatever_happens(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds memory and a range of ids."""
    monkeypatch.setattr(module, "_PATIENCE_S", SHORT_S)
    for _ in range(20):
        stock.blanks.create_noted()
        stock.blanks.command_ended()
        await _pass(0.005)
    await stock.until(2)
    await _pass()
    assert len(stock.spawner.made) == 2
    assert len({blank.id_base for blank in stock.blanks.there}) == 2


async def test_blank_that_cannot_be_made_is_tried_again_at_the_next_create(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a loop: what keeps it from that, such as a full machine, may last."""
    monkeypatch.setattr(module, "_PATIENCE_S", SHORT_S)
    stock.spawner.fault = SpawnerFault(errno.ENOSPC, "clone", "")
    stock.blanks.create_noted()
    await until(lambda: bool(stock.spawner.made) and stock.blanks.there == ())
    await _pass()
    assert len(stock.spawner.made) == 1

    stock.spawner.fault = None
    stock.blanks.create_noted()
    await stock.until(2)


async def test_range_of_an_ended_blank_can_be_used_again(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that of one that was taken is the taker's."""
    monkeypatch.setattr(module, "_PATIENCE_S", SHORT_S)
    stock.blanks.create_noted()
    await stock.until(2)
    taken = await stock.blanks.take(stock.blanks.offer() or "")
    assert taken is not None
    left = [blank.id_base for blank in stock.blanks.there]
    await stock.blanks.close()

    rest = {stock.ids.take() for _ in range(255)}

    assert left[0] in rest
    assert taken.id_base not in rest
