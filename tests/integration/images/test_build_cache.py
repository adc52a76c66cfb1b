"""What makes a step run again, and what does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coldframe.images.base import BuildStep, StepResult
from coldframe.images.build import BuildOptions, build
from coldframe.images.copying import Copy, copy_digest
from coldframe.images.sources import Source
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import DockerfileError
from coldframe.protocol.network import NetworkPolicy
from tests.integration.images.bench import Bench

TEXT = "FROM busybox\nRUN true\nCOPY . /src/\nRUN ls /src > /l\n"


def _ran(bench: Bench) -> int:
    count = len(bench.steps.ran)
    bench.steps.ran.clear()
    return count


def _copied(bench: Bench) -> bool:
    said = any(line.startswith("copied") for line in bench.lines)
    bench.lines.clear()
    return said


def _content(context: Path) -> None:
    (context / "file").write_text("b")


def _mode(context: Path) -> None:
    (context / "file").chmod(0o711)


def _name(context: Path) -> None:
    (context / "file").rename(context / "other")


def _more(context: Path) -> None:
    (context / "sub" / "new").touch()


def _kind(context: Path) -> None:
    (context / "file").unlink()
    (context / "file").symlink_to("a")


@pytest.mark.parametrize("change", [_content, _mode, _name, _more, _kind])
async def test_change_of_a_copied_file_runs_what_is_below(
    bench: Bench, change: Callable[[Path], None]
) -> None:
    """Bytes, mode, name and kind are what an image holds."""
    (bench.context / "sub").mkdir()
    bench.write(file="a")
    await bench.build(TEXT)
    assert (_ran(bench), _copied(bench)) == (2, True)

    change(bench.context)
    await bench.build(TEXT)

    assert (_ran(bench), _copied(bench)) == (1, True)


async def test_line_that_reads_like_a_script_is_not_that_script(bench: Bench) -> None:
    """Two different inputs with one key would give one's image to the other."""
    script = "#!/bin/sh\necho one > /x\n"
    await bench.build(f"FROM busybox\nRUN <<EOF\n{script}EOF\n")
    assert _ran(bench) == 1

    with pytest.raises(DockerfileError, match="exit code 127"):
        await bench.build(f"FROM busybox\nRUN {script.encode()!r}\n")


async def test_change_of_times_and_owners_does_no_work(bench: Bench) -> None:
    """A fresh clone has other times; nothing is copied again, let alone run."""
    bench.write(file="a")
    first = await bench.build(TEXT)
    assert (_ran(bench), _copied(bench)) == (2, True)

    os.utime(bench.context / "file", (1, 1))
    os.chown(bench.context / "file", 12, 34)
    again = await bench.build(TEXT)

    assert again == first
    assert (_ran(bench), _copied(bench)) == (0, False)


async def test_file_that_is_written_while_it_is_copied_is_not_remembered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept under the old content's digest would be found by it for ever."""
    bench.write(file="old")

    def slow_digest(source: Source, request: Copy) -> str:
        found = copy_digest(source, request)
        bench.write(file="new")
        return found

    monkeypatch.setattr("coldframe.images.steps.copy_digest", slow_digest)
    with pytest.raises(DockerfileError, match="Dockerfile:2: its sources were written to while"):
        await bench.build("FROM busybox\nCOPY file /f\n")
    monkeypatch.undo()
    bench.write(file="old")

    assert bench.read(await bench.build("FROM busybox\nCOPY file /f\n"), "f") == "old"


async def test_file_left_out_does_not_count(bench: Bench) -> None:
    """Logs that a test writes into its own tree must not rebuild the world."""
    bench.write(file="a", log="1", **{".dockerignore": "log\nDockerfile\n"})
    await bench.build(TEXT)
    _ran(bench)

    bench.write(log="2")
    await bench.build(TEXT)

    assert _ran(bench) == 0


async def test_argument_counts_where_it_is_in_scope_and_proxies_do_not(bench: Bench) -> None:
    """Another version is another step; another proxy is not."""
    text = "FROM busybox\nRUN echo first\nARG V=1\nRUN echo $V\n"
    for arguments, runs in [
        ({}, 2),
        ({"V": "2"}, 1),
        ({"V": "1"}, 0),
        ({"V": "2", "HTTP_PROXY": "http://proxy.example"}, 0),
        ({"OTHER": "x"}, 0),
    ]:
        await bench.build(text, arguments=arguments)
        assert _ran(bench) == runs, arguments


@pytest.mark.parametrize("line", ["LABEL a=1", 'SHELL ["/bin/ash", "-c"]', "EXPOSE 1"])
async def test_configuration_counts_for_run(bench: Bench, line: str) -> None:
    """It may be read by what runs, and is part of the image it runs on."""
    await bench.build("FROM busybox\nRUN id\n")
    await bench.build(f"FROM busybox\n{line}\nRUN id\n")

    assert _ran(bench) == 2


async def test_concurrent_builds_of_one_step_do_the_work_once(bench: Bench, tmp_path: Path) -> None:
    """A batch of rollouts begins with the same build; waiting ones must not fill the threads."""
    bench.write(Dockerfile="FROM busybox\nCOPY Dockerfile /x\nRUN true\n")
    running = most = 0

    async def slow(step: BuildStep) -> StepResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.3)
        done = await bench.steps(step)
        running -= 1
        return done

    async def one(number: int) -> str:
        with ImageStore(bench.store.root) as store:  # as another process would
            lines = bench.lines.append
            image = await build(
                store, f"n:{number}", bench.context, slow, network=NetworkPolicy(), progress=lines
            )
            return image.digest

    digests = await asyncio.gather(*(one(number) for number in range(40)))

    assert len(set(digests)) == 1
    assert (_ran(bench), most) == (1, 1)
    assert sum(line.startswith("copied") for line in bench.lines) == 1
    assert list((bench.store.root / "cache").glob("*.lock")) == []


async def test_builder_that_is_given_up_lets_the_next_one_go_on(bench: Bench) -> None:
    """A lock that outlived its holder would stop every build of that step."""
    bench.write(Dockerfile="FROM busybox\nRUN true\n")
    holds = asyncio.Event()

    async def hangs(step: BuildStep) -> StepResult:
        holds.set()
        await asyncio.sleep(600)
        return await bench.steps(step)

    lost = asyncio.create_task(
        build(bench.store, "a", bench.context, hangs, network=NetworkPolicy())
    )
    await holds.wait()
    waiting = asyncio.create_task(
        build(bench.store, "b", bench.context, bench.steps, network=NetworkPolicy())
    )
    await asyncio.sleep(0.2)
    assert not waiting.done()
    lost.cancel()

    await asyncio.wait_for(waiting, 60)

    assert _ran(bench) == 1


async def test_build_of_another_target_shares_the_steps(bench: Bench) -> None:
    """One Dockerfile, several images."""
    bench.write(Dockerfile="FROM busybox AS a\nRUN true\nFROM a AS b\nRUN id\n")
    for target in ("a", "b"):
        await build(
            bench.store,
            target,
            bench.context,
            bench.steps,
            options=BuildOptions(target=target),
            network=NetworkPolicy(),
        )

    assert _ran(bench) == 2


async def test_history_says_what_was_built_on_what(bench: Bench) -> None:
    """So that an alias is no secret, and an argument's value is none of the image's."""
    base = await bench.build("FROM busybox\nRUN echo base\n")
    bench.store.tag("team/python:1", base.layers, base.config, bench.store.inspect("built").history)
    bench.store.aliases.add("python:3.11-slim", "team/python:1")

    image = await bench.build(
        "ARG V=3.11\nFROM python:${V}-slim\nARG T\nRUN echo $T\n", arguments={"T": "hidden"}
    )

    history = bench.store.inspect("built").history
    assert [entry.instruction for entry in history] == [
        "FROM busybox",
        "RUN echo base",
        "FROM python:${V}-slim",
        "ARG T",
        "RUN echo $T",
    ]
    assert history[2].resolved == f"team/python:1@sha256:{base.digest}"
    assert history[-1].layer == image.layers[0]
    assert "hidden" not in str(history)
    assert "FROM python:${V}-slim: team/python:1 stands for it" in bench.lines
