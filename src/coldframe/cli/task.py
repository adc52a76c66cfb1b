"""`coldframe task`: write tasks, and check that they are honest before anybody learns from them."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group
from coldframe.cli.progress import going_on, outcome
from coldframe.cli.schemas import schema_problems
from coldframe.protocol.errors import InvalidRequestError
from coldframe.rollouts.check import Checked, Trial, check_task
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import Loaded, load_batch
from coldframe.rollouts.scaffold import write_new_task
from coldframe.rollouts.settings import RolloutSettings

app = group()


@app.callback()
def task() -> None:
    """Write tasks, and check that they are honest."""


@app.command("init")
def init(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where it is to lie.")],
    name: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Default: my/ and the directory's name.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Start from this image of the store, not a Dockerfile.")
    ] = None,
    multi_step: Annotated[
        bool, typer.Option("--multi-step", help="Two steps, the second only after the first.")
    ] = False,
    as_json: flags.Json = False,
) -> int:
    """Write a small task that `task check` passes, to be changed into yours."""
    if not directory.strip():
        raise InvalidRequestError("DIR is empty; name a directory that is not there yet")
    write_new_task(Path(directory), name=name, image=image, multi_step=multi_step)
    if as_json:
        print(json.dumps({"directory": directory}))
        return 0
    check = f"coldframe task check {directory}"
    print(render.safe(f"{directory}: written; now change it, and run: {check}"))
    return 0


@app.command("check")
def check(
    tasks: Annotated[
        list[Path],
        typer.Argument(metavar="TASK...", help="Task directories, or directories of them."),
    ],
    times: Annotated[int, typer.Option(help="Runs of each solution.")] = 2,
    concurrency: Annotated[int, typer.Option(help="Attempts at a time.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the reports as one JSON object at the end.")
    ] = False,
) -> int:
    """Check tasks: the solution passes, doing nothing and every wrong/* solution fail.

    Each so many times, with the same digests and rewards each time. Where a rewards.toml lies
    beside the tasks, every verdict must be what it declares, and its fixtures must hold. Exit
    code: 0 all are honest, 1 one is not, or was refused.
    """
    if times < 1 or concurrency < 1:
        raise InvalidRequestError("--times and --concurrency are at least 1")
    settings = RolloutSettings.from_environment()
    loaded = load_batch(tasks, settings.host_env)
    checked = asyncio.run(_check(loaded, times, concurrency))
    reports = [one.report() for one in checked]
    wrong = schema_problems(checked)
    if as_json:
        found = {"tasks": reports, "refused": loaded.refused, "schemas": wrong}
        print(json.dumps(found, sort_keys=True))
    else:
        _print(checked, loaded, wrong)
    honest = all(one.honest for one in checked) and not loaded.refused and not wrong
    return 0 if honest else 1


async def _check(loaded: Loaded, times: int, concurrency: int) -> list[Checked]:
    from coldframe.client import AsyncSandboxClient
    from coldframe.client._address import url_of_environment

    told: set[tuple[str, str]] = set()

    def heard(trial: Trial) -> None:
        key = trial.trajectory.identity.task.key
        mark = "ok " if trial.as_expected else "BAD"
        text = outcome(trial.trajectory)
        if (key, text) not in told and trial.trajectory.failure is not None:
            told.add((key, text))
        elif trial.trajectory.failure is not None:
            text = "the same failure"
        _say(f"{mark} {key}  {trial.contender.name}  {text}")

    def goes_on(key: str, contender: str, where: str, lasted_s: float) -> None:
        _say(f"... {key}  {contender}  {going_on(where, lasted_s)}")

    slots = asyncio.Semaphore(concurrency)
    async with AsyncSandboxClient(in_process=url_of_environment() is None) as client:
        images = ImageBuilder(client, heard=_say)
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(
                        check_task(
                            *(client, images, one),
                            times=times,
                            slots=slots,
                            heard=heard,
                            goes_on=partial(goes_on, one.key),
                        )
                    )
                    for one in loaded.tasks
                ]
        finally:
            await images.close()
    return [one.result() for one in running]


def _say(line: str) -> None:
    print(render.safe(line), file=sys.stderr, flush=True)


def _print(checked: list[Checked], loaded: Loaded, schemas: list[str]) -> None:
    rows = []
    for one in checked:
        for name, found in one.report()["contenders"].items():
            wanted = "passes" if found["should_pass"] else "fails"
            rows.append([one.task.key, name, wanted, f"{found['as_expected']}/{found['runs']}"])
    if rows:
        print(render.table(["TASK", "SOLUTION", "OUGHT TO", "DID"], rows))
    problems = [f"{one.task.key}: {problem}" for one in checked for problem in one.problems]
    problems += [f"refused: {why}" for why in loaded.refused.values()]
    problems += schemas
    for problem in problems:
        print(f"problem: {render.sentence(problem)}")
    honest = sum(one.honest for one in checked)
    print(f"\n{honest} of {len(checked) + len(loaded.refused)} tasks are honest")
