"""Cut the instructions of a Dockerfile into stages, and tell which of them a target needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coldframe.images.arguments import Arguments, platform, platform_arguments
from coldframe.images.dockerfile import Instruction
from coldframe.images.mounts import mounted_from
from coldframe.images.variables import WordError, expand
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.text import excerpt

_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it."""

    index: int
    name: str | None
    start: Instruction
    base: str
    """What FROM names, variables replaced."""
    parent: int | None
    """The stage that it names; None: an image, or `scratch`."""
    lines: tuple[Instruction, ...]


@dataclass(frozen=True)
class Stages:
    """A Dockerfile's stages, and the arguments that were declared before the first."""

    arguments: Mapping[str, str]
    stages: tuple[Stage, ...]

    def find(self, reference: str, before: int) -> int | None:
        """Return the stage that COPY --from or FROM means in stage `before`, if it is one."""
        for stage in reversed(self.stages[:before]):
            if stage.name == reference.lower():
                return stage.index
        number = int(reference) if re.fullmatch(r"[0-9]{1,4}", reference) else before
        return number if number < before else None

    def needed(self, target: str | None) -> tuple[int, ...]:
        """Return the stages that a target needs, itself last; None: the last stage.

        Raises:
            InvalidRequestError: there is no such stage.
        """
        last = len(self.stages)
        wanted = last - 1 if target is None else self.find(target, last)
        if wanted is None:
            known = ", ".join(stage.name or str(stage.index) for stage in self.stages)
            raise InvalidRequestError(
                f"no stage {excerpt(str(target))} in the Dockerfile; there are: {known}"
            )
        needed: set[int] = set()
        waiting = [wanted]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += self._read_by(self.stages[index])
        return tuple(sorted(needed))

    def _read_by(self, stage: Stage) -> list[int]:
        names = [line.flags["from"] for line in stage.lines if "from" in line.flags]
        names += [name for line in stage.lines for name in mounted_from(line)]
        found = [self.find(name, stage.index) for name in names]
        return [one for one in (stage.parent, *found) if one is not None]


def cut_stages(instructions: Sequence[Instruction], given: Mapping[str, str]) -> Stages:
    """Return the stages; `given` are the build arguments.

    Raises:
        DockerfileError: a FROM or an ARG before it is not well formed.
    """
    known = platform_arguments()
    scope = Arguments(given, known)
    stages: list[Stage] = []
    starts = [at for at, line in enumerate(instructions) if line.keyword == "FROM"]
    for line in instructions[: starts[0]]:
        try:
            scope.declare(line, {**known, **scope.values})
        except WordError as error:
            raise line.refuse(str(error)) from error
    outer = {**known, **scope.values}
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        lines = tuple(instructions[start + 1 : end])
        stages.append(_stage(instructions[start], lines, outer, Stages(outer, tuple(stages))))
    return Stages(outer, tuple(stages))


def _stage(
    start: Instruction, lines: tuple[Instruction, ...], outer: Mapping[str, str], before: Stages
) -> Stage:
    try:
        words = [expand(word, outer, start.escape) for word in start.value.split()]
        wanted = expand(start.flags.get("platform", ""), outer, start.escape)
    except WordError as error:
        raise start.refuse(str(error)) from error
    if wanted not in ("", platform()):
        raise start.refuse(
            f"FROM --platform={wanted} is not supported: this machine runs {platform()}"
        )
    name = None
    if len(words) == 3 and words[1].upper() == "AS":
        name = words.pop().lower()
        words.pop()
        if not _NAME.fullmatch(name):
            raise start.refuse(
                f"{excerpt(name)} is no stage name: a letter, then letters, digits, _ . -"
            )
        if any(stage.name == name for stage in before.stages):
            raise start.refuse(f"a second stage {excerpt(name)}; give it another name")
    if len(words) != 1:
        raise start.refuse(f"FROM {start.value}: write FROM IMAGE, or FROM IMAGE AS NAME")
    if not words[0]:
        raise start.refuse(
            f"FROM {start.value} names no image: give its variable a value, "
            "by ARG NAME=DEFAULT before the first FROM or by --build-arg NAME=VALUE"
        )
    index = len(before.stages)
    parent = next(
        (one.index for one in reversed(before.stages) if one.name == words[0].lower()), None
    )
    return Stage(index, name, start, words[0], parent, lines)
