"""Dockerfiles built over a real overlay."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from coldframe.images.base import BuildStep, StepResult
from coldframe.images.build import build
from coldframe.protocol.errors import (
    BuildStepError,
    ImageError,
    ShellNotFoundError,
)
from coldframe.protocol.network import NetworkPolicy
from tests.integration.images.bench import Bench, Refuse


async def test_build_of_every_instruction_gives_the_image_they_describe(bench: Bench) -> None:
    """The whole language at once, as a task's environment uses it."""
    bench.write(hello="hello", other="other")
    (bench.context / "sub" / "deep").mkdir(parents=True)
    (bench.context / "sub" / "deep" / "file").write_text("deep")
    (bench.context / "sub" / "link").symlink_to("/etc/passwd")

    image = await bench.build(
        "FROM busybox AS base\n"
        "ENV ROOT=/srv NAME='a b'\n"
        "ENV OLD form  is one value\n"
        "WORKDIR $ROOT/app\n"
        "RUN echo agent:x:7:8::/:/bin/sh >> /etc/passwd && echo crew:x:9: >> /etc/group\n"
        "COPY hello other ./\n"
        "COPY sub data/\n"
        "COPY --chown=agent --chmod=600 hell? owned/by/agent\n"
        "COPY --chown=agent:crew hello ${ROOT}/crew\n"
        "USER agent\n"
        "WORKDIR mine\n"
        'RUN ["/bin/sh", "-c", "echo \\"$NAME $OLD $(id -u) $PWD\\" > out"]\n'
    )

    assert (image.name, image.config.user) == ("built:latest", "agent")
    assert image.config.workdir == "/srv/app/mine"
    assert dict(image.config.env)["OLD"] == "form  is one value"
    assert bench.read(image, "srv/app/hello") == "hello"
    assert bench.read(image, "srv/app/data/deep/file") == "deep"
    assert bench.read(image, "srv/app/mine/out") == "a b form  is one value 7 /srv/app/mine\n"
    assert bench.owner(image, "srv/app/owned/by/agent") == (0o600, 7, 8)
    assert bench.owner(image, "srv/app/owned/by") == (0o755, 7, 8)
    assert bench.owner(image, "srv/crew")[1:] == (7, 9)
    assert bench.owner(image, "srv/app/mine") == (0o755, 7, 8)
    link = bench.view(image).resolve(b"srv/app/data/link", follow=False)
    assert link.stat is not None
    assert stat.S_ISLNK(link.stat.st_mode)


TEXT = "FROM busybox\nRUN echo 1 > /one\nCOPY file /file\nRUN cat /file > /two\n"


async def test_build_again_runs_nothing(bench: Bench) -> None:
    """Rollouts build the environment of every sample."""
    bench.write(file="a")
    first = await bench.build(TEXT)

    again = await bench.build(TEXT)

    assert again == first
    assert bench.steps.ran == ["echo 1 > /one", "cat /file > /two"]


async def test_build_after_a_change_runs_what_is_below_it_only(bench: Bench) -> None:
    """The cache must neither miss an unchanged step nor hit a changed one."""
    bench.write(file="a")
    await bench.build(TEXT)
    bench.write(file="b")

    image = await bench.build(TEXT)

    assert bench.steps.ran == ["echo 1 > /one", "cat /file > /two", "cat /file > /two"]
    assert bench.read(image, "two") == "b"


@pytest.mark.parametrize("line", ["ENV A=1", "USER 1", "WORKDIR /tmp"])
async def test_build_with_other_config_runs_the_step_again(bench: Bench, line: str) -> None:
    """What a command does depends on its environment, user and directory."""
    await bench.build("FROM busybox\nRUN id\n")
    await bench.build(f"FROM busybox\n{line}\nRUN id\n")

    assert bench.steps.ran == ["id", "id"]


async def test_build_without_cache_runs_everything(bench: Bench) -> None:
    """For steps whose result depends on more than the image."""
    await bench.build("FROM busybox\nRUN id\n")
    await bench.build("FROM busybox\nRUN id\n", cached=False)

    assert bench.steps.ran == ["id", "id"]


async def test_failed_step_that_printed_much_shows_whole_lines_of_its_end(refuse: Refuse) -> None:
    """Half a word at the beginning reads like a part of our own sentence."""
    lines = "i=1; while [ $i -le 999 ]; do echo line $i; i=$((i + 1)); done"

    shown = await refuse(f"FROM busybox\nRUN {lines}; false\n")

    assert re.match(r"2: `RUN i=1; while .*` failed with exit code 1:\nline \d+\nline ", shown)
    assert shown.endswith("\nline 999")


async def test_failed_step_says_line_code_and_output_and_keeps_the_steps_before(
    bench: Bench, refuse: Refuse
) -> None:
    """The author needs the line and the reason; the next try must not begin from nothing."""
    text = "FROM busybox\nRUN echo fine > /a\n\nRUN echo out && \\\n  echo why >&2 && exit 3\n"

    assert await refuse(text) == (
        "4: `RUN echo out && echo why >&2 && exit 3` failed with exit code 3:\nout\nwhy"
    )

    await refuse(text)
    assert bench.steps.ran.count("echo fine > /a") == 1


async def test_step_that_replaces_a_directory_hides_what_was_in_it(bench: Bench) -> None:
    """Whiteouts and opaque directories are the difference between a layer and a tar."""
    bench.write(new="new")
    image = await bench.build(
        "FROM busybox\n"
        "RUN mkdir /d /e && echo 1 > /d/old && echo 1 > /e/old\n"
        "RUN rm -r /d && mkdir /d && rm /e/old && rm /etc/hosts\n"
        "COPY new /d/\n"
        "COPY new /e/sub/new\n"
        "RUN ls /d /e > /listing; test ! -e /etc/hosts\n"
    )

    assert bench.read(image, "listing") == "/d:\nnew\n\n/e:\nsub\n"
    for path in ("d/old", "e/old", "etc/hosts"):
        assert bench.view(image).resolve(path.encode()).stat is None


async def test_view_of_layers_is_what_the_kernel_shows(bench: Bench, tmp_path: Path) -> None:
    """COPY decides by the view; were it wrong, it would shadow or reveal files."""
    image = await bench.build(
        "FROM busybox\n"
        "RUN mkdir -p /a/b/c /x/y && touch /a/1 /a/b/2 /x/y/3 && ln -s ../x /a/link\n"
        "RUN rm -r /a/b && mkdir /a/b && touch /a/b/4 && rm -r /x/y && touch /x/y\n"
        "RUN rm /x/y && mkdir -m 750 /x/y && touch /x/y/5 && chown 3:4 /x/y && rm /a/1\n"
    )
    merged = tmp_path / "merged"
    merged.mkdir()
    lowers = ":".join(str(bench.store.layer_root(layer)) for layer in image.layers)
    script = (
        f"mount -t overlay overlay -o ro,lowerdir={lowers} {merged} && cd {merged} && "
        "find . -printf '%P|%y|%m|%U:%G\\n'"
    )
    seen = await asyncio.to_thread(_shell_with_mounts, script)

    view = bench.view(image)
    kinds = {"d": stat.S_IFDIR, "f": stat.S_IFREG, "l": stat.S_IFLNK}
    paths = set()
    for line in seen.splitlines():
        path, kind, mode, owner = line.split("|")
        paths.add(path)
        status = view.resolve(path.encode(), follow=False).stat
        assert status is not None, path
        assert stat.S_IFMT(status.st_mode) == kinds[kind], path
        assert f"{stat.S_IMODE(status.st_mode):o}" == mode, path
        assert f"{status.st_uid}:{status.st_gid}" == owner, path
    for layer in image.layers:
        root = bench.store.layer_root(layer)
        for hidden in {str(path.relative_to(root)) for path in root.rglob("*")} - paths:
            assert view.resolve(hidden.encode(), follow=False).stat is None, hidden


def _on_host(path: str) -> bool:
    return Path(path).exists()


def _shell_with_mounts(script: str) -> str:
    return subprocess.check_output(["unshare", "-m", "/bin/sh", "-c", script], text=True)


async def test_copy_keeps_what_directories_of_the_image_are(bench: Bench) -> None:
    """A COPY to /tmp that made it 0755 would break every program that writes there."""
    bench.write(file="x")
    bench.context.chmod(0o711)

    image = await bench.build("FROM busybox\nCOPY --chown=5:5 file /tmp/\nCOPY file /root/a/b\n")

    assert bench.owner(image, "tmp") == (0o1777, 0, 0)
    assert bench.owner(image, "root") == (0o700, 0, 0)
    assert bench.owner(image, "tmp/file")[1:] == (5, 5)
    assert bench.owner(image, "root/a")[1:] == (0, 0)


async def test_copy_through_links_of_the_image_stays_inside(bench: Bench) -> None:
    """`/lib -> /usr/lib` must lead to the image's /usr/lib, and a hostile link to nowhere else."""
    bench.write(file="x")
    image = await bench.build(
        "FROM busybox\n"
        "RUN mkdir -p /usr/lib && ln -s /usr/lib /lib && ln -s ../../../../../../tmp /up "
        "&& ln -s /etc/hosts /file\n"
        "COPY file /lib/\nCOPY file /up/stayed\nCOPY file /\n"
    )

    assert bench.read(image, "usr/lib/file") == "x"
    assert bench.read(image, "tmp/stayed") == "x"
    assert bench.read(image, "file") == "x"
    assert "localhost" in (bench.read(image, "etc/hosts") or "")
    assert not _on_host("/tmp/stayed")


async def test_copy_from_scratch_makes_an_image_without_a_shell(bench: Bench) -> None:
    """Static programs need no base."""
    bench.write(file="x")
    image = await bench.build("FROM scratch\nWORKDIR /w\nCOPY file .\n")

    assert (len(image.layers), bench.read(image, "w/file")) == (2, "x")


async def test_copy_patterns_match_within_one_directory(bench: Bench) -> None:
    """As Docker's do: a star never crosses a slash."""
    bench.write(**{"a.py": "a", "b.py": "b", "c.txt": "c", "[x].py": "x"})
    (bench.context / "sub").mkdir()
    (bench.context / "sub" / "d.py").write_text("d")

    image = await bench.build(
        "FROM busybox\nCOPY [a-b].py s*/*.py /one/\nCOPY [^ab].txt /two/\nCOPY *.py /three/\n"
    )

    for path, there in [("one/a.py", 1), ("one/d.py", 1), ("one/c.txt", 0), ("two/c.txt", 1)]:
        assert (bench.read(image, path) is not None) == bool(there), path
    assert bench.read(image, "three/[x].py") == "x"
    assert bench.read(image, "three/d.py") is None


async def test_copy_of_a_pattern_that_names_nothing_copies_the_rest(bench: Bench) -> None:
    """`COPY uv.lock* ./` is how a file that may be missing is copied."""
    bench.write(a="a")

    image = await bench.build("FROM busybox\nCOPY a lock* /x/\nCOPY none* ./\n")

    assert bench.read(image, "x/a") == "a"
    assert "copied 0 entries" in bench.lines


async def test_copy_of_the_whole_context_takes_its_content(bench: Bench) -> None:
    """`COPY . .` is the commonest line there is."""
    bench.write(file="x")
    (bench.context / "sub").mkdir()
    (bench.context / "sub" / "tool").write_text("t")
    (bench.context / "sub" / "tool").chmod(0o4755)

    image = await bench.build("FROM busybox\nENV PATH=/opt/app:$PATH\nWORKDIR /opt/app\nCOPY . .\n")

    assert bench.read(image, "opt/app/file") == "x"
    assert bench.owner(image, "opt/app/sub/tool") == (0o4755, 0, 0)
    assert dict(image.config.env)["PATH"].startswith("/opt/app:/usr/local/sbin:")


async def test_owner_from_a_hostile_passwd_is_a_number_or_refused(
    bench: Bench, refuse: Refuse
) -> None:
    """The image's /etc/passwd is text that a stranger wrote."""
    bench.write(file="x", passwd="odd:x:²:1::/:\nbig:x:99999:1::/:\nshort:x\n\n:::\n")

    for user, said in [("odd", "no user"), ("short", "no user"), ("big", "0 to 65535 only")]:
        text = f"FROM busybox\nCOPY passwd /etc/\nCOPY --chown={user} file /x\n"
        assert said in await refuse(text)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("COPY ../secret /x", "3: '../secret' would leave the build context"),
        ("COPY sub/../../secret /x", "3: 'sub/../../secret' would leave"),
        ("COPY nothing /x", "3: 'nothing' is not in the build context"),
        ("COPY file/x /x", "3: 'file/x' is not in the build context"),
        ("COPY file", "3: COPY needs at least one source and a target"),
        ("COPY --chmod=rwx file /x", "3: --chmod=rwx is no mode; write 0755, +x or"),
        ("COPY --chown=a:b:c file /x", "3: 'a:b:c' is not USER or USER:GROUP"),
        ("ENV A", "3: ENV A has no value"),
        ("ENV A=1 B", "3: 'B': write NAME=VALUE"),
        ("ENV A='x", "3: a quote (') is not closed"),
        ("USER $NONE", "3: '' is not USER or USER:GROUP"),
        ("WORKDIR $NONE", "3: the path is empty"),
        ("RUN []", "3: RUN [] names no program"),
        ("RUN x\nFOO x", "4: 'FOO' is no instruction"),
        ("COPY escape /x", "3: 'escape' is or lies below a link"),
        ("COPY escape/hosts /x", "3: 'escape' is or lies below a link"),
        ("COPY fifo /x", "3: 'fifo' is neither"),
    ],
)
async def test_bad_line_is_refused_before_anything_runs(
    bench: Bench, refuse: Refuse, line: str, said: str
) -> None:
    """A build of ten minutes that fails at its last line's typing error wastes ten minutes."""
    bench.write(file="x")
    bench.context.with_name("secret").write_text("secret")
    (bench.context / "sub").mkdir()
    (bench.context / "escape").symlink_to("/etc")
    os.mkfifo(bench.context / "fifo")

    assert (await refuse(f"FROM busybox\nRUN echo early\n{line}\n")).startswith(said)
    assert bench.steps.ran == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("COPY file sub /x", "several sources need a target that ends in /"),
        ("COPY file /etc/hosts/x", "'/etc/hosts' is not a directory"),
        ("COPY sub /etc/hosts", "'/etc/hosts' is not a directory"),
        ("COPY tree /", "'/etc' is a directory in the image"),
        ("COPY --chown=ghost file /x", "no user 'ghost' in the image's /etc/passwd"),
        ("COPY --chown=0:ghost file /x", "no group 'ghost' in the image's /etc/group"),
        ("COPY --chown=70000 file /x", "'70000': an image holds the ids 0 to 65535 only"),
    ],
)
async def test_copy_that_does_not_fit_the_image_is_refused(
    bench: Bench, refuse: Refuse, line: str, said: str
) -> None:
    """It depends on what earlier steps made, so it is seen when its turn comes."""
    bench.write(file="x")
    (bench.context / "sub").mkdir()
    (bench.context / "tree").mkdir()
    (bench.context / "tree" / "etc").write_text("a file where the image has a directory")

    assert said in await refuse(f"FROM busybox\n{line}\n")


async def test_step_that_cannot_be_started_names_its_line(bench: Bench) -> None:
    """An image without a shell, or a USER that nothing made: the author's to mend."""

    async def no_shell(step: BuildStep) -> StepResult:
        raise ShellNotFoundError("no /bin/sh in the image")

    (bench.context / "Dockerfile").write_text("FROM busybox\nRUN echo 1\n")

    with pytest.raises(BuildStepError, match="2: `RUN echo 1` was not started: no /bin/sh"):
        await build(bench.store, "x", bench.context, no_shell, network=NetworkPolicy())


async def test_from_of_missing_image_says_how_to_get_it(refuse: Refuse) -> None:
    """With the line, since the name stands there."""
    assert (await refuse("FROM nothing:1\n")).startswith("1: no image 'nothing:1' in the store")
    assert (await refuse("FROM $BASE\n")).startswith("1: FROM $BASE names no image")


async def test_missing_dockerfile_or_context_is_named(bench: Bench, tmp_path: Path) -> None:
    """One sentence for a typing error."""
    with pytest.raises(ImageError, match="Dockerfile: No such file"):
        await build(bench.store, "x", bench.context, bench.steps)
    with pytest.raises(ImageError, match="nothing is not a directory"):
        await build(bench.store, "x", tmp_path / "nothing", bench.steps)


async def test_progress_tells_each_step_and_what_was_cached(bench: Bench) -> None:
    """People watch a build."""
    await bench.build("FROM busybox\nRUN echo 1\nENV A=1\n")
    await bench.build("FROM busybox\nRUN echo 1\nENV A=1\n")

    assert bench.lines == [
        "[1/2] RUN echo 1",
        "[2/2] ENV A=1",
        "[1/2] RUN echo 1",
        "cached",
        "[2/2] ENV A=1",
    ]


async def test_long_line_is_cut_visibly(bench: Bench) -> None:
    """A command that ends in the middle of a word looks as if it had been run so."""
    await bench.build(f"FROM busybox\nENV A={'x' * 200}\n")

    assert [line[-3:] for line in bench.lines] == ["xx…"]


async def test_long_step_is_reported_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence for ten minutes looks like a hang."""
    monkeypatch.setattr("coldframe.images.steps.REPORT_S", 0.1)

    await bench.build("FROM busybox\nRUN sleep 0.5\n")

    assert any(line.startswith("still running after 0 s; may take 600 s") for line in bench.lines)
