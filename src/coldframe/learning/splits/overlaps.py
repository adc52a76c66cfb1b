"""What two splits have in common: the same task, a task under another name, or nearly a task."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from coldframe.learning.splits.manifest import SplitError, SplitManifest, SplitTask
from coldframe.learning.splits.similarity import likeness, normal

THRESHOLD = 0.8
SKETCHED = ("instruction", "tests")
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
    found = _Index(right)
    for task in left.tasks:
        for index in sorted(found.candidates(left, task, threshold)):
            other = right.tasks[index]
            reasons = tuple(_reasons(left, task, right, other, threshold))
            if reasons:
                yield task, other, reasons


class _Index:
    """The tasks of a split by what they may have in common with another, so that not every pair
    has to be looked at."""

    def __init__(self, split: SplitManifest) -> None:
        self._tasks = split.tasks
        self._places: dict[object, list[int]] = defaultdict(list)
        for index, task in enumerate(split.tasks):
            for trait in (*_traits(split, task), *_values(task)):
                self._places[trait].append(index)

    def candidates(self, split: SplitManifest, task: SplitTask, threshold: float) -> set[int]:
        """Return the tasks that are the same as this in something, or may be nearly the same.

        Of two sketches, a share of `threshold` of the longer one at least must be common.
        """
        places = self._places
        found = {index for trait in _traits(split, task) for index in places.get(trait, ())}
        for what in SKETCHED:
            own = _sketch(task, what)
            common: Counter[int] = Counter()
            for value in own:
                common.update(places.get((what, value), ()))
            found |= {
                index
                for index, count in common.items()
                if count / max(len(own), len(_sketch(self._tasks[index], what))) >= threshold
            }
        return found


def _traits(split: SplitManifest, task: SplitTask) -> Iterator[object]:
    yield from (("key", key) for key in _keys(task))
    yield "digest", task.digest
    yield "group", split.by, task.group


def _values(task: SplitTask) -> Iterator[tuple[str, int]]:
    for what in SKETCHED:
        yield from ((what, value) for value in _sketch(task, what))


def _sketch(task: SplitTask, what: str) -> tuple[int, ...]:
    return task.instruction if what == "instruction" else task.tests


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
    for what in SKETCHED:
        found = likeness(_sketch(one, what), _sketch(two, what))
        if found >= threshold:
            yield f"{what} nearly the same: {found:.2f}"
