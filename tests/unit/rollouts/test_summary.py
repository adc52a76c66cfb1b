"""What a run came to. The whole point: nothing missing is ever counted as 0."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from coldframe.protocol.errors import Side
from coldframe.rollouts.summary import pass_at_k, passed, summarise
from coldframe.trajectories.phases import Egress, PhaseRecord, TamperEvent
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import BlobStore
from coldframe.trajectories.verification import Verification
from tests.unit.trajectories.samples import trajectory


def summary(trajectories: list[Trajectory], samples: int = 2, **values: object) -> dict:
    defaults: dict = {
        "thresholds": {"one": 1.0},
        "refused": {},
        "interrupted": False,
    }
    return summarise("run-1", trajectories, samples=samples, **(defaults | values))


def test_summary_counts_a_missing_verdict_apart_from_the_mean(tmp_path: Path) -> None:
    """One verdict of 1 and one dead sandbox: the mean is 1 over one verdict, not 0.5."""
    blobs = BlobStore(tmp_path)
    found = summary(
        [
            trajectory(blobs, sample=0, reward=1.0),
            trajectory(blobs, sample=1, reward=None, side=Side.INFERENCE),
        ]
    )

    task = found["tasks"]["one"]
    assert (task["mean_reward"], task["verdicts"], task["missing"]) == (1.0, 1, 1)
    assert task["failures_by_side"] == {"inference": {"x": 1}}
    assert task["pass_at_k"] == {"1": 1.0, "2": None}
    assert not found["complete"]


def test_summary_counts_a_recovered_sample_once(tmp_path: Path) -> None:
    """A retry is the same sample; counted as two it would leak a whole group."""
    blobs = BlobStore(tmp_path)
    found = summary(
        [
            trajectory(blobs, sample=0, attempt=0, reward=None),
            trajectory(blobs, sample=0, attempt=1, reward=0.0),
            trajectory(blobs, sample=1, reward=1.0),
        ]
    )

    task = found["tasks"]["one"]
    assert (task["attempts"], task["retries"], task["verdicts"]) == (3, 1, 2)
    assert (task["mean_reward"], task["passes"]) == (0.5, 1)
    assert found["complete"]
    assert found["totals"]["failed_attempts"] == 1


def test_summary_without_any_verdict_has_no_mean(tmp_path: Path) -> None:
    """No number at all is the honest mean of nothing."""
    found = summary([trajectory(BlobStore(tmp_path), reward=None)])

    assert found["tasks"]["one"]["mean_reward"] is None
    assert found["totals"]["missing"] == 2


def test_summary_with_a_refused_task_is_not_complete() -> None:
    """The exit code must say that something was not run."""
    assert not summary([], samples=1, thresholds={}, refused={"/t": "gpus"})["complete"]


def test_summary_adds_the_parts_of_t_run(tmp_path: Path) -> None:
    """T_run = create + model + exec + verify + delete."""
    found = summary([trajectory(BlobStore(tmp_path))], samples=1)

    assert found["totals"]["times"]["run_s"] == 15.0


def test_summary_tells_what_casts_doubt_on_verdicts(tmp_path: Path) -> None:
    """A mean over verdicts that somebody may have forged must not look like any other."""
    event = TamperEvent(
        at=1.0, what="program_changed", path="/bin/sh", before="a", after="b", voided=False
    )
    egress = Egress(counts={"tcp.refused": 2, "dns.allowed": 1, "policy.allowed": 3})
    phase = PhaseRecord(name="agent", started_at=1.0, ended_at=2.0, egress=egress)
    doubtful = trajectory(BlobStore(tmp_path)).model_copy(
        update={
            "tamper": (event,),
            "phases": (phase, phase),
            "verification": Verification(forgeable=True),
        }
    )
    found = summary([doubtful, trajectory(BlobStore(tmp_path), sample=1)])

    assert found["tasks"]["one"]["tamper"] == {"attempts": 1, "voided": 0, "forgeable": 1}
    assert found["totals"]["egress"] == {"dns.allowed": 2, "tcp.refused": 4}
    assert found["totals"]["phases"] == {"agent": {"count": 2, "seconds": 2.0}}


def test_pass_at_k_equals_the_share_of_all_subsets() -> None:
    """The estimator is unbiased exactly because it averages over all choices of k."""
    for verdicts in range(1, 7):
        for passes in range(verdicts + 1):
            outcomes = [True] * passes + [False] * (verdicts - passes)
            for k in range(1, verdicts + 1):
                chosen = [any(one) for one in combinations(outcomes, k)]
                assert pass_at_k(verdicts, passes, k) == pytest.approx(sum(chosen) / len(chosen))
    assert pass_at_k(1, 1, 2) is None


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ({"reward": 1.0}, True),
        ({"reward": 0.99}, False),
        ({"reward": 1.0, "style": 0.0}, True),
        ({"a": 1.0, "b": 1.0}, True),
        ({"a": 2.0, "b": 0.5}, False),
    ],
)
def test_passed_needs_the_reward_part_or_every_part(
    rewards: dict[str, float], verdict: bool
) -> None:
    """A mean over parts would let one part pay for another that failed."""
    assert passed(rewards, 1.0) is verdict
