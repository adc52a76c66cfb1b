"""A template that is wrong teaches everybody who starts from it the same mistake."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coldframe import AsyncSandboxClient
from coldframe.cli.task import app
from coldframe.protocol.errors import TaskError
from coldframe.rollouts.check import check_task
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import load_task
from coldframe.rollouts.scaffold import write_new_task

KINDS = [
    pytest.param({}, id="dockerfile"),
    pytest.param({"image": "busybox"}, id="image"),
    pytest.param({"multi_step": True}, id="multi-step"),
]


@pytest.mark.parametrize("options", KINDS)
def test_new_task_is_accepted_as_it_is(tmp_path: Path, options: dict[str, str]) -> None:
    """Every file in it is used: what the reader does not need is refused by it."""
    directory = tmp_path / "word-count"
    write_new_task(directory, **options)  # type: ignore[arg-type]
    task = load_task(directory)

    assert (task.name, len(task.wrong)) == ("my/word-count", 2)
    assert task.multi_step is bool(options.get("multi_step"))
    assert all(step.reference is not None for step in task.steps)
    scripts = [*directory.rglob("*.sh")]
    assert scripts and all(one.stat().st_mode & stat.S_IXUSR for one in scripts)


@pytest.mark.parametrize(
    "name", ['q"', "back\\slash", "two\nlines", "\x7f\x1b", "ünï", "\U0001f600"]
)
def test_new_task_holds_whatever_its_directory_is_called(tmp_path: Path, name: str) -> None:
    """A template that its own reader refuses helps nobody."""
    write_new_task(tmp_path / name, image='no"such')
    task = load_task(tmp_path / name)

    assert (task.name, task.environment.docker_image) == (f"my/{name}", 'no"such')


def test_new_task_that_no_file_can_name_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """One sentence, and no half of a task."""
    with pytest.raises(TaskError, match="not UTF-8"):
        write_new_task(tmp_path / "bad\udcff")

    assert not [*tmp_path.iterdir()]


def test_task_init_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    """Somebody's task is not written over."""
    (tmp_path / "mine").write_text("")

    with pytest.raises(TaskError, match="not empty"):
        write_new_task(tmp_path)

    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_task_init_writes_where_it_is_told(tmp_path: Path) -> None:
    """The command is the way in; its options reach the files."""
    directory = tmp_path / "new"
    result = CliRunner().invoke(
        app,
        ["init", str(directory), "--name", "org/x", "--multi-step", "--json"],
        standalone_mode=False,
    )

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"directory": str(directory)}
    task = load_task(directory)
    assert (task.name, [step.name for step in task.steps]) == ("org/x", ["total", "mean"])


@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", KINDS)
async def test_new_task_in_real_sandboxes_tells_right_from_wrong(
    tmp_path: Path, native_async_client: AsyncSandboxClient, options: dict[str, str]
) -> None:
    """`task check` passes before a line of it was changed."""
    write_new_task(tmp_path / "new", **options)  # type: ignore[arg-type]
    images = ImageBuilder(native_async_client)
    try:
        checked = await check_task(
            native_async_client,
            images,
            load_task(tmp_path / "new"),
            times=1,
            slots=asyncio.Semaphore(2),
        )
    finally:
        await images.close()

    assert checked.problems == ()
