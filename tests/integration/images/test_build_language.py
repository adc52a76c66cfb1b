"""What a Dockerfile may say beyond the plain instructions, built over a real overlay."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from coldframe.images.base import Healthcheck, Image
from tests.integration.images.bench import Bench, Refuse

# --- what is copied -------------------------------------------------------------------


def listing(bench: Bench, image: Image) -> list[str]:
    return bench.read(image, "listing").split()


TREE = ("src/app/main.py", "src/app/notes.md", "src/lib/deep/util.py", "src/lib/deep/data.txt")


@pytest.fixture
def tree(bench: Bench) -> None:
    for name in (*TREE, "readme.md", "run.sh"):
        path = bench.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


LIST = "RUN cd /to && find . -type f | sort > /listing\n"


@pytest.mark.parametrize(
    ("line", "made"),
    [
        (
            "COPY --exclude=*.md src /to/",
            ["app/main.py", "lib/deep/data.txt", "lib/deep/util.py", "app/notes.md"],
        ),
        (
            "COPY --exclude=**/*.md src /to/",
            ["app/main.py", "lib/deep/data.txt", "lib/deep/util.py"],
        ),
        ("COPY --exclude=**/*.md --exclude=lib/deep src /to/", ["app/main.py"]),
        (
            "COPY --exclude=lib --exclude=!lib/deep/util.py src /to/",
            ["app/main.py", "app/notes.md", "lib/deep/util.py"],
        ),
        ("COPY --exclude=*.md *.md run.sh /to/", ["run.sh"]),
        ("ADD --exclude=app src /to/", ["lib/deep/data.txt", "lib/deep/util.py"]),
        ("COPY --parents src/app/main.py run.sh /to/", ["run.sh", "src/app/main.py"]),
        ("COPY --parents src/lib /to/", ["src/lib/deep/data.txt", "src/lib/deep/util.py"]),
        (
            "COPY --parents src/./*/*.py src/./lib/deep /to/",
            ["app/main.py", "lib/deep/data.txt", "lib/deep/util.py"],
        ),
        ("COPY --parents ./src/lib/./deep/*.py /to/", ["deep/util.py"]),
        (
            "COPY --parents --exclude=**/*.txt src /to/",
            ["src/app/main.py", "src/app/notes.md", "src/lib/deep/util.py"],
        ),
    ],
)
@pytest.mark.usefixtures("tree")
async def test_copy_leaves_out_and_keeps_parents_as_said(
    bench: Bench, line: str, made: list[str]
) -> None:
    """What a Dockerfile of a larger project says to have fewer layers, and smaller ones."""
    image = await bench.build(f"FROM busybox\n{line}\n{LIST}")

    assert [one.removeprefix("./") for one in listing(bench, image)] == sorted(made)


@pytest.mark.usefixtures("tree")
async def test_copy_of_what_was_left_out_is_done_once(bench: Bench) -> None:
    """A file that stays behind changes no layer; another pattern does."""
    text = f"FROM busybox\nCOPY --exclude=**/*.md src /to/\n{LIST}"
    first = await bench.build(text)
    (bench.context / "src" / "app" / "notes.md").write_text("other")
    again = await bench.build(text)
    other = await bench.build(text.replace("**/*.md", "**/*.txt"))

    assert again.layers == first.layers
    assert other.layers != first.layers


# --- arguments ------------------------------------------------------------------------


async def test_arguments_reach_run_and_are_not_kept(bench: Bench) -> None:
    """A version is chosen outside; the image's environment says nothing of it."""
    text = (
        "ARG BASE=busybox\nARG HEAD=head\n"
        "FROM $BASE\n"
        "ARG HEAD\nARG A=one B=$A-two\nARG NONE\nENV C=${A}3\n"
        'RUN echo "$HEAD $A $B $C ${NONE-unset} ${http_proxy-unset}" > /out\n'
    )

    plain = await bench.build(text)
    given = await bench.build(text, arguments={"A": "x", "NONE": "n", "http_proxy": "p"})

    assert bench.read(plain, "out") == "head one one-two one3 unset unset\n"
    assert bench.read(given, "out") == "head x x-two x3 n p\n"
    assert set(dict(plain.config.env)) == {"PATH", "C"}


async def test_argument_is_known_from_its_line_on_and_env_counts_more(bench: Bench) -> None:
    """As with Docker: ENV wins wherever it stands, and a stage starts anew."""
    image = await bench.build(
        "FROM busybox AS one\n"
        "ENV E=env\n"
        "RUN echo ${A-unset} > /before\n"
        "ARG A=a E=arg\n"
        "RUN echo $A $E > /after\n"
        "FROM one AS child\n"
        "RUN echo ${A-unset} > /child\n"
        "FROM busybox\n"
        "COPY --from=child /before /after /child /\n"
        "RUN echo ${A-unset} > /other\n",
    )

    seen = [bench.read(image, name) for name in ("before", "after", "child", "other")]
    assert seen == ["unset\n", "a env\n", "a\n", "unset\n"]


async def test_argument_that_nothing_declares_is_said(bench: Bench) -> None:
    """A typing error in its name would build the default in silence."""
    await bench.build("FROM busybox\nARG A\nRUN true\n", arguments={"A": "1", "TYPO": "2"})

    assert bench.lines[0] == "build argument TYPO: no ARG declares it"


# --- configuration --------------------------------------------------------------------


async def test_configuration_is_kept_and_inherited(bench: Bench) -> None:
    """Tasks start the entry point and ask the health check as the image says."""
    base = await bench.build(
        "FROM busybox\nRUN true\n"
        'ENTRYPOINT ["/bin/server"]\nCMD ["--help"]\nEXPOSE 80\nLABEL a=1\n'
        "HEALTHCHECK --interval=2s CMD wget -q localhost\nSTOPSIGNAL INT\nVOLUME /data\n"
    )
    bench.store.tag("base", base.layers, base.config)

    child = await bench.build('FROM base\nLABEL b=2\nENTRYPOINT ["/bin/other"]\n')
    other = await bench.build('FROM base\nCMD ["x"]\nENTRYPOINT ["y"]\nHEALTHCHECK NONE\n')

    assert child.config.entrypoint == ("/bin/other",)
    assert child.config.cmd == (), "the base's CMD was for the base's entry point"
    assert dict(child.config.labels) == {"a": "1", "b": "2"}
    assert child.config.healthcheck == Healthcheck(
        ("/bin/sh", "-c", "wget -q localhost"), interval_s=2.0
    )
    assert (child.config.exposed_ports, child.config.stop_signal) == (("80/tcp",), "SIGINT")
    assert (other.config.cmd, other.config.healthcheck) == (("x",), None)


async def test_shell_runs_what_follows_and_is_inherited(bench: Bench) -> None:
    """`pipefail` is why people write it: the step fails where it would not."""
    text = 'FROM busybox AS a\nSHELL ["/bin/ash", "-o", "pipefail", "-c"]\nFROM a\n'

    await bench.build(text + "RUN set -o | grep -q 'pipefail.*on'\n")

    assert bench.steps.ran == [
        ("/bin/ash", "-o", "pipefail", "-c", "set -o | grep -q 'pipefail.*on'")
    ]


async def test_on_build_runs_on_top_and_no_further(bench: Bench) -> None:
    """Base images for courses and builders live by it."""
    bench.write(file="x")
    base = await bench.build(
        "FROM busybox\nRUN true\nONBUILD COPY file /f\nONBUILD RUN cat /f > /g\n"
    )
    assert bench.read(base, "f") is None
    bench.store.tag("base", base.layers, base.config)

    child = await bench.build("FROM base\nRUN cat /g > /h\n")

    assert bench.read(child, "h") == "x"
    assert child.config.on_build == ()


# --- stages ---------------------------------------------------------------------------

STAGES = (
    "FROM busybox AS tools\n"
    "RUN mkdir -p /out/sub && echo tool > /out/sub/tool && chmod 750 /out/sub/tool "
    "&& chown 7:8 /out/sub/tool && ln -s sub/tool /out/link && rm /etc/hosts\n"
    "FROM busybox AS unused\n"
    "RUN echo never\n"
    "FROM busybox\n"
    "COPY --from=tools /out/ /all/\n"
    "COPY --from=0 --chown=1:2 --chmod=0600 /out/link /out/s*/t* /some/\n"
)


async def test_stages_build_what_is_needed_only(bench: Bench) -> None:
    """A source that is a link is followed inside its stage; links below it stay links."""
    image = await bench.build(STAGES)

    assert "echo never" not in bench.steps.ran
    assert bench.owner(image, "all/sub/tool") == (0o750, 0, 0)
    link = bench.view(image).resolve(b"all/link", follow=False)
    assert link.stat is not None
    assert stat.S_ISLNK(link.stat.st_mode)
    for name in ("link", "tool"):
        assert bench.read(image, f"some/{name}") == "tool\n"
        assert bench.owner(image, f"some/{name}") == (0o600, 1, 2)


async def test_target_ends_the_build_at_its_stage(bench: Bench) -> None:
    """By name or number; what is below is not built."""
    image = await bench.build(STAGES, target="tools")

    assert bench.read(image, "out/sub/tool") == "tool\n"
    assert bench.view(image).resolve(b"etc/hosts").stat is None
    assert len(bench.steps.ran) == 1


async def test_copy_from_image_sees_it_whole(bench: Bench) -> None:
    """Whiteouts, opaque directories and all: as a sandbox would."""
    made = await bench.build(
        "FROM busybox\n"
        "RUN mkdir -p /d/old /d/kept && touch /d/old/1 /d/kept/2 /d/3\n"
        "RUN rm -r /d/old && mkdir /d/old && touch /d/old/4 && rm /d/3\n"
    )
    bench.store.tag("made", made.layers, made.config)

    image = await bench.build(
        "FROM busybox\nCOPY --from=made /d /d\nRUN cd /d && find | sort > /l\n"
    )

    assert bench.read(image, "l") == ".\n./kept\n./kept/2\n./old\n./old/4\n"


async def test_copy_from_cannot_leave_the_image(bench: Bench, refuse: Refuse) -> None:
    """A hostile stage's links lead to its own files at most."""
    stage = "FROM busybox AS s\nRUN ln -s /etc/hostname /link && ln -s ../../../../etc /up\n"
    said = await refuse(f"{stage}FROM busybox\nCOPY --from=s /link /x\n")
    assert said == "4: '/etc/hostname' is not in the image"

    image = await bench.build(f"{stage}FROM busybox\nCOPY --from=s /up/hosts /x\n")

    assert "localhost" in (bench.read(image, "x") or "")
    assert bench.read(image, "x") != Path("/etc/hosts").read_text()  # noqa: ASYNC240


# --- here-documents -------------------------------------------------------------------


async def test_here_documents_run_and_are_copied(bench: Bench) -> None:
    """Scripts inside the Dockerfile, with and without variables."""
    image = await bench.build(
        "FROM busybox\n"
        "ENV V=value\n"
        "COPY <<ONE <<-'TWO' /files/\n"
        "# $V \\$V ${NONE:-none} 'q'\n"
        "ONE\n"
        "\t$V \\$V\n"
        "\tTWO\n"
        "COPY --chmod=+x --chown=3 <<EOF /tool\n#!/bin/sh\necho tool\nEOF\n"
        "RUN <<EOF\n"
        "cd /tmp\n"
        "# a comment, kept\n"
        "echo $V > here\n"
        "EOF\n"
        "RUN cat <<A > /both && cat <<'B' >> /both\n1 $V\nA\n2 $V\nB\n"
        'RUN <<EOF\n#!/usr/bin/awk -f\nBEGIN { print 6 * 7 > "/awk" }\nEOF\n'
        "RUN /tool > /said\n"
    )

    assert bench.read(image, "files/ONE") == "# value $V none 'q'\n"
    assert bench.read(image, "files/TWO") == "$V \\$V\n"
    assert bench.owner(image, "files/ONE") == (0o644, 0, 0)
    assert bench.owner(image, "tool") == (0o755, 3, 3)
    assert bench.read(image, "tmp/here") == "value\n"
    assert bench.read(image, "both") == "1 value\n2 $V\n"
    assert (bench.read(image, "awk"), bench.read(image, "said")) == ("42\n", "tool\n")
    assert bench.view(image).resolve(b".coldframe").stat is None


# --- ADD ------------------------------------------------------------------------------


def _archive(path: Path, mode: str, **files: str) -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size, info.uid, info.gid, info.mode = len(content), 5, 6, 0o640
            archive.addfile(info, io.BytesIO(content.encode()))


@pytest.mark.parametrize("kind", ["w", "w:gz", "w:bz2", "w:xz"])
async def test_add_unpacks_archives_into_the_image(bench: Bench, kind: str) -> None:
    """By content, whatever the name; into directories that the image keeps as they are."""
    _archive(bench.context / "thing", kind, usr__lib__x="x", etc__new="n")
    bench.write(plain="not an archive")

    image = await bench.build(
        "FROM busybox\nRUN mkdir -p /r/real && ln -s real /r/etc && chmod 700 /r/real\n"
        "ADD thing /r\nADD --chown=1 thing plain /p/\nCOPY thing /kept\n"
    )

    assert bench.read(image, "r/usr/lib/x") == "x"
    assert bench.read(image, "r/real/new") == "n"
    assert bench.owner(image, "r/real") == (0o700, 0, 0)
    assert bench.owner(image, "r/usr/lib/x") == (0o640, 5, 6)
    assert bench.owner(image, "p/usr/lib/x") == (0o640, 1, 1)
    assert bench.read(image, "p/plain") == "not an archive"
    kept = bench.view(image).read(b"kept")
    assert kept == (bench.context / "thing").read_bytes()


async def test_add_keeps_hard_links_of_an_archive(bench: Bench) -> None:
    """A hundred names of one program must not become a hundred programs."""
    with tarfile.open(bench.context / "t", "w") as archive:
        first = tarfile.TarInfo("d/a")
        first.size = 1
        archive.addfile(first, io.BytesIO(b"x"))
        second = tarfile.TarInfo("d/b")
        second.type, second.linkname = tarfile.LNKTYPE, "d/a"
        archive.addfile(second)

    image = await bench.build("FROM busybox\nADD t /x/\nRUN stat -c %h /x/d/b > /links\n")

    assert bench.read(image, "links") == "2\n"


# --- .dockerignore --------------------------------------------------------------------


async def test_dockerignore_keeps_files_out(bench: Bench, refuse: Refuse) -> None:
    """Keys and build trees; what is taken back in comes with its directory as it is."""
    for name in ("a.py", "a.pyc", "secret/key", "deep/er/keep", "deep/er/drop"):
        path = bench.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (bench.context / "deep").chmod(0o750)
    (bench.context / ".dockerignore").write_text("**/*.pyc\nsecret\ndeep\n!**/keep\nDockerfile\n")

    image = await bench.build(
        "FROM busybox\nCOPY . /x\nCOPY *.py* /y/\nRUN cd /x && find | sort > /l\n"
    )

    assert (
        bench.read(image, "l") == ".\n./.dockerignore\n./a.py\n./deep\n./deep/er\n./deep/er/keep\n"
    )
    assert bench.owner(image, "x/deep")[0] == 0o750
    assert bench.read(image, "y/a.pyc") is None
    ignore = bench.context / ".dockerignore"
    for source in ("secret", "secret/key", "a.pyc"):
        said = await refuse(f"FROM busybox\nCOPY {source} /z\n")
        assert said.startswith(f"2: '{source}' is left out of the build context by {ignore}:")


async def test_dockerignore_beside_the_dockerfile_counts_first(bench: Bench) -> None:
    """One context, several Dockerfiles."""
    bench.write(one="1", two="2")
    (bench.context / ".dockerignore").write_text("one\n")
    (bench.context / "Dockerfile.dockerignore").write_text("two\n")

    image = await bench.build("FROM busybox\nCOPY [a-z]* /x/\n")

    assert (bench.read(image, "x/one"), bench.read(image, "x/two")) == ("1", None)


# --- mounts ---------------------------------------------------------------------------


async def test_mounts_are_seen_by_their_step_and_not_kept(bench: Bench) -> None:
    """A cache in the image is what the mount is there to avoid."""
    bench.write(requirements="six")
    image = await bench.build(
        "FROM busybox AS tools\nRUN mkdir /bin2 && echo 'echo hi' > /bin2/tool\n"
        "FROM busybox\n"
        "RUN mkdir /etc/cache && touch /etc/cache/own\n"
        "RUN --mount=type=cache,target=/etc/cache,mode=0700 --mount=type=tmpfs,target=/scratch \\\n"
        "    --mount=source=requirements,target=/app/requirements \\\n"
        "    --mount=type=bind,from=tools,source=/bin2,dst=/tools <<EOF\n"
        "ls /etc/cache > /listed\n"
        "stat -c %a /etc/cache >> /listed\n"
        "cat /app/requirements > /seen\n"
        "sh /tools/tool > /said\n"
        "touch /etc/cache/new /scratch/new /tools/new /app/made\n"
        "EOF\n"
        "RUN ls /etc/cache > /after\n"
    )

    assert bench.read(image, "listed") == "700\n"
    assert (bench.read(image, "seen"), bench.read(image, "said")) == ("six", "hi\n")
    assert bench.read(image, "after") == "own\n"
    view = bench.view(image)
    for path in (b"etc/cache/new", b"scratch", b"tools", b"app/requirements"):
        assert view.resolve(path).stat is None, path
    assert bench.read(image, "app/made") == ""


async def test_mounted_content_counts_for_the_cache(bench: Bench) -> None:
    """The step reads it."""
    text = "FROM busybox\nRUN --mount=source=file,target=/f cat /f > /g\n"
    bench.write(file="1")
    await bench.build(text)
    bench.write(file="2")

    image = await bench.build(text)

    assert bench.read(image, "g") == "2"


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "ADD https://files.example/x /x",
            "2: ADD https://files.example/x: nothing is fetched here",
        ),
        ("ADD git@host.example:it.git /x", "2: ADD git@host.example:it.git: nothing is fetched"),
        ("COPY --from=9 /a /b", "2: --from=9: there is no such stage before this one"),
        ("COPY --from=none /a /b", "2: no image 'none:latest'"),
        ("COPY --from=$X /a /b", "2: '$X' is not an image name"),
        ("RUN --mount=type=secret,id=x true", "2: RUN --mount=type=secret is not supported"),
        ("RUN --mount=type=ssh true", "2: RUN --mount=type=ssh is not supported"),
        ("RUN --mount=type=cache true", "2: RUN --mount=type=cache needs target=PATH"),
        ("RUN --mount=type=cache,target=/x,zip=1 true", "2: RUN --mount=type=cache with 'zip'"),
        ("RUN --mount=source=none,target=/x true", "2: 'none' is not in the build context"),
        (
            "RUN --network=host true",
            "2: RUN --network=host is not supported; write default or none",
        ),
        ("COPY <<EOF\nEOF", "2: COPY needs at least one source and a target"),
        ("FROM x${A", "2: 'x${A': a brace is not closed"),
        ("ARG A=${B?give-B}", "2: B: give-B"),
        ("WORKDIR ${A:-${B:-}}", "2: the path is empty"),
        ("ONBUILD ONBUILD RUN a", "2: ONBUILD ONBUILD is not possible"),
        ("RUN --mount=type=tmpfs,target=/ true", "2: RUN --mount: target=/ is the root"),
    ],
)
async def test_line_that_cannot_be_honoured_is_refused_by_name(
    bench: Bench, refuse: Refuse, line: str, said: str
) -> None:
    """With what to write instead."""
    assert (await refuse(f"FROM busybox\n{line}\n")).startswith(said)
    assert bench.steps.ran == []


async def test_mount_may_be_quoted_and_relative(bench: Bench) -> None:
    """As generated Dockerfiles write it."""
    bench.write(lock="l")

    image = await bench.build(
        "FROM busybox\nWORKDIR /app\n"
        'RUN --mount="type=bind,source=lock,target=lock" --mount=type=cache,target="/c" '
        "cat lock > seen && ls /c >> seen\n"
    )

    assert bench.read(image, "app/seen") == "l"
    assert bench.view(image).resolve(b"c").stat is None


# --- layers -----------------------------------------------------------------------------


async def test_step_that_makes_a_layer_again_leaves_an_image_that_runs(bench: Bench) -> None:
    """A `chmod` that is needed on one machine only: overlay refuses a layer that is there twice."""
    (bench.context / "tool").write_text("x")
    (bench.context / "tool").chmod(0o755)
    image = await bench.build(
        "FROM busybox\nCOPY tool /tool\nRUN chmod 755 /tool\nRUN echo ran > /after\n"
    )

    assert bench.read(image, "after") == "ran\n"
    assert len(set(image.layers)) == len(image.layers)
