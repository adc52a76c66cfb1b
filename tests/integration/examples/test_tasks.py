"""The shipped tasks: accepted by our own reader, and honest in real sandboxes."""

from __future__ import annotations

import asyncio
import re
import stat
from pathlib import Path

import pytest

from coldframe import AsyncSandboxClient
from coldframe.cli.schemas import schema_problems
from coldframe.rollouts.check import check_task
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import find_tasks, load_task
from coldframe.rollouts.task import Task

TASKS = find_tasks([Path(__file__).resolve().parents[3] / "examples" / "tasks"])
by_name = pytest.mark.parametrize("directory", TASKS, ids=lambda path: path.name)


def test_examples_are_at_least_seventeen() -> None:
    """A task that is not found would be a test that is silently not run."""
    assert len(TASKS) >= 17


def scripts(task: Task) -> list[Path]:
    """The solve.sh of every wrong solution, step by step."""
    return [one / "solve.sh" for step in task.steps for one in step.wrong.values()]


@by_name
def test_example_is_accepted_and_says_what_it_is(directory: Path) -> None:
    """People copy these: each must be complete, and refused by nothing."""
    task = load_task(directory)

    assert task.name == f"coldframe/{directory.name}"
    assert all(step.reference is not None for step in task.steps)
    assert len(task.wrong) >= 2
    assert task.environment.network_declared is not None
    assert all(step.agent.timeout_s is not None for step in task.steps)


@by_name
def test_example_scripts_can_be_executed(directory: Path) -> None:
    """Harbor runs them as programs; a lost mode bit would fail there and not here."""
    programs = [*directory.rglob("test.sh"), *directory.rglob("solve.sh")]

    assert [one for one in programs if not one.stat().st_mode & stat.S_IXUSR] == []


@by_name
def test_example_instruction_names_what_is_graded(directory: Path) -> None:
    """A path that the grader looks at and the instruction does not name is a hidden demand."""
    instructions = "".join(step.instruction for step in load_task(directory).steps)
    graders = "".join(one.read_text() for one in directory.rglob("tests/**/grade.py"))

    assert graders
    graded = set(re.findall(r'"(/(?:srv|home)/[\w./-]+)"', graders))
    assert {path for path in graded if path not in instructions} == set()


@by_name
def test_example_wrong_solutions_say_what_is_wrong(directory: Path) -> None:
    """Each must fail for a reason of its own, or it proves nothing."""
    notes = [
        [line for line in script.read_text().splitlines()[1:4] if line[:2] == "# "]
        for script in scripts(load_task(directory))
    ]

    assert all(notes)
    assert len({note[0] for note in notes}) == len(notes)


@pytest.mark.root
@pytest.mark.timeout(300)
@by_name
async def test_example_in_real_sandboxes_tells_right_from_wrong(
    directory: Path, native_async_client: AsyncSandboxClient
) -> None:
    """The solution passes; doing nothing and every wrong solution fail, by verdict."""
    images = ImageBuilder(native_async_client)
    try:
        checked = await check_task(
            native_async_client,
            images,
            load_task(directory),
            times=1,
            slots=asyncio.Semaphore(3),
        )
    finally:
        await images.close()

    assert checked.problems == ()
    assert schema_problems([checked]) == []


@pytest.mark.root
async def test_example_repository_does_not_hold_its_repair(
    native_async_client: AsyncSandboxClient,
) -> None:
    """An agent that reads the answer in the history learns to look there, not to repair."""
    directory = next(one for one in TASKS if one.name == "repair-version-resolver")
    images = ImageBuilder(native_async_client)
    try:
        built = await images.image(load_task(directory))
    finally:
        await images.close()
    objects = "git cat-file --batch-check='%(objectname)' --batch-all-objects | sort"

    async with await native_async_client.create_sandbox(built.name) as sandbox:
        before = set((await sandbox.exec(objects)).text.split())
        await sandbox.files.upload(directory / "solution" / "solve.sh", "/solve.sh")
        solved = await sandbox.exec(["sh", "/solve.sh"])
        changed = await sandbox.exec("git diff-tree -r HEAD~1 HEAD | awk '{print $4}'")

    assert solved.ok, solved.stderr
    assert len(before) > 10
    assert set(changed.text.split())
    assert before & set(changed.text.split()) == set()
