"""How a run's attempts are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.cli.run_view import ATTEMPTS, row
from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.schema import Times
from coldframe.trajectories.store import BlobStore
from tests.unit.trajectories import samples


def test_columns_of_an_attempt_add_up_to_its_total(tmp_path: Path) -> None:
    """Else whoever looks for lost time finds some that is only not shown."""
    times = Times(
        create_s=1, model_s=2, exec_s=4, verify_s=8, delete_s=16, other_s=32, total_s=63, queue_s=9
    )
    made = samples.trajectory(BlobStore(tmp_path), task="sum", sample=0, reward=1.0)
    shown = row(AttemptKey("sum", 0, 0), made.model_copy(update={"times": times}))
    cells = dict(zip(ATTEMPTS, shown, strict=True))
    parts = ATTEMPTS[ATTEMPTS.index("CREATE") : -1]
    assert sum(float(cells[name]) for name in parts) == pytest.approx(float(cells["TOTAL"]))
