"""What two splits have in common: the same task, a task under another name, or nearly a task."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from coldframe.learning.splits.manifest import SplitError, SplitManifest, SplitTask
from coldframe.learning.splits.similarity import likeness, normal

THRESHOLD = 0.8
_NO_NAME = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Overlap:
    """One task in each of two splits, and what they have in common."""

    left: tuple[str, str]
    """Label of the split, and the task's key."""
    right: tuple[str, str]
    reasons: tuple[str, ...]


def overlaps(
    manifests: Mapping[str, SplitManifest], *, threshold: float = THRESHOLD
) -> tuple[Overlap, ...]:
    """Return every pair of tasks of different splits that have something in common.

    Args:
        manifests: by the label that names them in the answer.
        threshold: share of runs of words in common, of instructions or of tests, from which on two
            tasks count as nearly the same.
    Raises:
        SplitError: the threshold is not above 0 and at most 1.
    """
    if not 0 < threshold <= 1:
        raise SplitError(f"--threshold {threshold} is not above 0 and at most 1")
    return tuple(
        Overlap((left, one.key), (right, two.key), reasons)
        for left, right in combinations(manifests, 2)
        for one, two, reasons in _between(manifests[left], manifests[right], threshold)
    )


def _between(
    left: SplitManifest, right: SplitManifest, threshold: float
) -> Iterator[tuple[SplitTask, SplitTask, tuple[str, ...]]]:
    traits: dict[object, list[int]] = defaultdict(list)
    for index, task in enumerate(right.tasks):
        for trait in _traits(right, task):
            traits[trait].append(index)
    for task in left.tasks:
        candidates = {index for trait in _traits(left, task) for index in traits.get(trait, ())}
        for index in sorted(candidates):
            other = right.tasks[index]
            reasons = tuple(_reasons(left, task, right, other, threshold))
            if reasons:
                yield task, other, reasons


def _traits(manifest: SplitManifest, task: SplitTask) -> Iterator[object]:
    """Yield everything of which two tasks must share something to have anything in common."""
    yield from (("key", key) for key in _keys(task))
    yield "digest", task.digest
    yield "group", manifest.by, task.group
    yield from (("instruction", value) for value in task.instruction)
    yield from (("tests", value) for value in task.tests)


def _keys(task: SplitTask) -> set[str]:
    names = {task.key, task.name, task.name.rpartition("/")[2]}
    return {_NO_NAME.sub("-", normal(name)).strip("-") for name in names} - {""}


def _reasons(
    left: SplitManifest, one: SplitTask, right: SplitManifest, two: SplitTask, threshold: float
) -> Iterator[str]:
    same = _keys(one) & _keys(two)
    if same:
        yield f"the same key: {min(same, key=lambda key: (len(key), key))}"
    if one.digest == two.digest:
        yield f"the same content: {one.digest[:12]}"
    if left.by == right.by and one.group == two.group:
        yield f"the same {left.by}: {one.group}"
    for what in ("instruction", "tests"):
        found = likeness(getattr(one, what), getattr(two, what))
        if found >= threshold:
            yield f"{what} nearly the same: {found:.2f}"
