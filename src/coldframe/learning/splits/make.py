"""Assign tasks to splits, group by group.

A group goes where the hash of its name falls, so that the same tasks are split alike everywhere,
and tasks that come later move none that were there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coldframe.learning.splits.corpus import ALONE, CorpusTask, moment
from coldframe.learning.splits.manifest import SplitError, SplitManifest, SplitTask


@dataclass(frozen=True)
class SplitPlan:
    """How tasks are to be split."""

    by: str
    shares: Mapping[str, float]
    """Of the groups, by the split's name; they add up to 1."""
    seed: str = "0"
    cut: str | None = None
    """By time: ISO date from which on tasks belong to the second split."""

    def split_of(self, group: str) -> str:
        """Return the split of a group; a pure function of the plan and the group's name."""
        names = list(self.shares)
        if self.by == "time":
            later = moment(group, "group") >= moment(self.cut, "--cut")
            return names[1] if later else names[0]
        text = "\0".join(("coldframe.split/1", self.seed, self.by, group))
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        bound = 0.0
        for name, share in self.shares.items():
            bound += share
            if place < bound:
                return name
        return names[-1]


def make_splits(tasks: Iterable[CorpusTask], plan: SplitPlan) -> tuple[SplitManifest, ...]:
    """Return one manifest per split, their tasks in the order of their keys.

    Raises:
        SplitError: the plan is not one, a task does not say its group, or a split would be empty.
    """
    _check(plan)
    entries = _entries([*tasks], plan.by)
    members: dict[str, list[SplitTask]] = {name: [] for name in plan.shares}
    for entry in entries:
        members[plan.split_of(entry.group)].append(entry)
    for name, found in members.items():
        if not found:
            groups = len({entry.group for entry in entries})
            advice = "another --cut" if plan.by == "time" else "other shares, or another --seed"
            raise SplitError(
                f"split {name!r} would have none of {groups} groups by {plan.by}; choose {advice}"
            )
    return tuple(
        SplitManifest(
            name=name,
            by=plan.by,
            seed=plan.seed,
            cut=plan.cut,
            shares=dict(plan.shares),
            tasks=tuple(sorted(found, key=lambda one: (one.key, one.digest))),
        )
        for name, found in members.items()
    )


def _entries(tasks: Sequence[CorpusTask], by: str) -> list[SplitTask]:
    """Return what manifests keep of the tasks.

    Raises:
        SplitError: one does not say its group; says by what all of them could be grouped.
    """
    try:
        return [task.entry(by) for task in tasks]
    except SplitError as error:
        said = [
            {name for name, value in task.metadata.items() if isinstance(value, str | int)}
            for task in tasks
        ]
        common = ", ".join(sorted(set.intersection(*said)))
        raise SplitError(
            f"{error}; all of the {len(tasks)} tasks say: {common or 'nothing'}. "
            f"--by {ALONE} makes each a group of its own, if they have nothing in common"
        ) from error


def _check(plan: SplitPlan) -> None:
    shares = list(plan.shares.values())
    if len(shares) < 2 or not all(0 < share < 1 for share in shares):
        raise SplitError("a plan has two splits or more, each with a share between 0 and 1")
    if not math.isclose(math.fsum(shares), 1.0, abs_tol=1e-9):
        raise SplitError(f"the shares add up to {math.fsum(shares):g}, not to 1")
    if (plan.by == "time") != (plan.cut is not None):
        raise SplitError("--by time and --cut DATE go together")
    if plan.by == "time" and len(shares) != 2:
        raise SplitError("a split by time has two parts: before --cut, and from then on")
