"""Build images from Dockerfiles: read, plan everything, then do the steps of the stages needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from coldframe.images import names
from coldframe.images.arguments import PROXIES
from coldframe.images.base import HistoryEntry, Image, Progress, RunStep, quiet
from coldframe.images.dockerfile import Instruction, decode, parse
from coldframe.images.plan import SCRATCH, Planned, PlannedStage, Planner
from coldframe.images.sources import Context, read_ignore, read_small
from coldframe.images.stages import cut_stages
from coldframe.images.steps import Steps
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import ImageError, ImageNotFoundError, InvalidRequestError
from coldframe.protocol.network import PRESETS, NetworkPolicy

DEADLINE_S = 600.0
NETWORK = NetworkPolicy(presets=PRESETS)
"""What RUN may reach unless told otherwise: this machine's own package indexes."""

_MOST_DOCKERFILE = 1 << 20
_MOST_NOTED = 2000

History = tuple[HistoryEntry, ...]


@dataclass(frozen=True)
class BuildOptions:
    """What decides what is built, beside the files."""

    dockerfile: Path | None = None
    """None: `Dockerfile` in the context."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Values for ARG."""
    target: str | None = None
    """The stage to build, by name or number; None: the last."""


async def build(
    store: ImageStore,
    name: str,
    context: Path,
    run_step: RunStep,
    *,
    options: BuildOptions = BuildOptions(),
    network: NetworkPolicy = NETWORK,
    deadline_s: float = DEADLINE_S,
    cached: bool = True,
    progress: Progress = quiet,
) -> Image:
    """Build the Dockerfile of a context directory and give the image a name.

    Args:
        network: what RUN steps may reach.
        deadline_s: of each RUN step, in seconds.
        cached: whether steps that were done before are taken from the store.
    Raises:
        DockerfileError: a line is refused; begins with file:line.
        BuildStepError: a RUN failed; begins with file:line.
        ImageError: the context or the Dockerfile cannot be read.
        InvalidRequestError: not a name, or no such target.
        StorageFullError: no space is left.
    """
    name = names.normalise(name)
    plan = await asyncio.to_thread(_prepare, store, context, options)
    for unused in plan.unused:
        progress(f"build argument {unused}: no ARG declares it")
    steps = Steps(store, plan.context, run_step, deadline_s, network, cached, progress)
    total = sum(len(stage.steps) for stage in plan.stages)
    number = 0
    histories: dict[int, History] = {}
    for stage in plan.stages:
        image, history = _begin(store, stage, steps, histories)
        image = replace(image, name=name)
        for step in stage.steps:
            number += 1
            progress(f"[{number}/{total}] {step.instruction.shown}")
            image, layer = await steps.do(image, step)
            history += (_entry(step, layer),)
        steps.stages[stage.stage.index] = image
        histories[stage.stage.index] = history
    if not image.layers:
        raise ImageError(f"{context}: nothing was copied: an image needs at least one layer")
    return store.tag(name, image.layers, image.config, history)


def check(
    store: ImageStore, name: str, context: Path, *, options: BuildOptions = BuildOptions()
) -> None:
    """Refuse what `build` would refuse before anything runs. Raises as `build` does."""
    names.normalise(name)
    _prepare(store, context, options)


@dataclass(frozen=True)
class _Plan:
    context: Context
    stages: tuple[PlannedStage, ...]
    unused: tuple[str, ...]
    """Build arguments that nothing declares."""


def _prepare(store: ImageStore, context: Path, options: BuildOptions) -> _Plan:
    """Read, check and plan everything; nothing has run when this raises."""
    for argument, value in options.arguments.items():
        if not argument or "=" in argument or "\0" in argument + value:
            raise InvalidRequestError(
                f"build argument {argument!r}: no NAME, or a value with a NUL"
            )
    file = options.dockerfile or context / "Dockerfile"
    if not context.is_dir():
        raise ImageError(f"{context} is not a directory")
    raw = read_small(file, _MOST_DOCKERFILE)
    if raw is None:
        raise ImageError(f"{file}: No such file")
    instructions = parse(decode(raw, str(file)), str(file))
    stages = cut_stages(instructions, options.arguments)
    files = Context(context, read_ignore(context, file))
    planner = Planner(store, files, stages, options.arguments)
    planned = [planner.plan(stages.stages[index]) for index in stages.needed(options.target)]
    known = {*PROXIES, *_declared(instructions)}
    return _Plan(files, tuple(planned), tuple(sorted(set(options.arguments) - known)))


def _declared(instructions: tuple[Instruction, ...]) -> set[str]:
    lines = (line for line in instructions if line.keyword == "ARG")
    return {word.partition("=")[0] for line in lines for word in line.value.split()}


def _begin(
    store: ImageStore, stage: PlannedStage, steps: Steps, histories: Mapping[int, History]
) -> tuple[Image, History]:
    """Return what a stage starts from, and how that came to be."""
    start = stage.stage.start
    entry = HistoryEntry(start.text[:_MOST_NOTED])
    if stage.base is None:
        assert stage.stage.parent is not None
        parent = stage.stage.parent
        return steps.stages[parent], (*histories[parent], entry)
    if stage.base is SCRATCH:
        return SCRATCH, (entry,)
    resolved = f"{stage.base.name}@sha256:{stage.base.digest}"
    if stage.base.name != names.reference(stage.stage.base)[0]:
        steps.progress(f"{start.shown}: {stage.base.name} stands for it")
    try:
        before = store.inspect(stage.base.name).history
    except ImageNotFoundError:  # removed meanwhile; its layers are held
        before = ()
    return stage.base, (*before, replace(entry, resolved=resolved))


def _entry(step: Planned, layer: str | None) -> HistoryEntry:
    resolved = None
    if step.copy is not None and isinstance(step.copy.origin, Image):
        resolved = f"{step.copy.origin.name}@sha256:{step.copy.origin.digest}"
    return HistoryEntry(step.instruction.text[:_MOST_NOTED], layer, resolved)
