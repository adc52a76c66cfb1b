"""Contexts and archives that were made to harm: safe, bounded, and said in one sentence."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import time
from pathlib import Path

import pytest

from coldframe.images.build import check
from coldframe.protocol.errors import DockerfileError, ImageError
from tests.integration.images.bench import Bench, Refuse


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([_member("../x")], "'../x' would leave the tree"),
        ([_member("a/../../x")], "'a/../../x' would leave the tree"),
        ([_member("l", tarfile.SYMTYPE, "/etc"), _member("l/x")], "something lies below 'l'"),
        ([_member("h", tarfile.LNKTYPE, "/etc/passwd")], "'h' is a hard link to '/etc/passwd'"),
        ([_member("h", tarfile.LNKTYPE, "../../etc/passwd")], "would leave the tree"),
        ([_member("n", tarfile.CHRTYPE)], "'n' is a device"),
    ],
)
async def test_add_of_hostile_archive_is_refused_by_name(
    bench: Bench, refuse: Refuse, members: list[tarfile.TarInfo], said: str
) -> None:
    """Unpacked alone, so that not even the image's own links are in reach."""
    with tarfile.open(bench.context / "t.tar", "w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO())

    message = await refuse("FROM busybox\nADD t.tar /x/\n")

    assert message.startswith("2: 't.tar': ")
    assert said in message


async def test_add_of_absolute_names_stays_below_the_target(bench: Bench) -> None:
    """As tar does: the leading slash is nothing."""
    with tarfile.open(bench.context / "t.tar", "w") as archive:
        archive.addfile(_member("/etc/new"), io.BytesIO())

    image = await bench.build("FROM busybox\nADD t.tar /x/\n")

    assert bench.read(image, "x/etc/new") == ""
    assert bench.read(image, "etc/new") is None


async def test_add_of_damaged_archive_is_refused(bench: Bench, refuse: Refuse) -> None:
    """Half an archive is half a toolchain."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        info = _member("big")
        info.size = 100_000
        archive.addfile(info, io.BytesIO(bytes(100_000)))
    (bench.context / "t.tar").write_bytes(whole.getvalue()[:50_000])

    assert "cut short" in await refuse("FROM busybox\nADD t.tar /x/\n")


async def test_odd_entries_of_a_context_are_copied_or_refused_by_name(
    bench: Bench, refuse: Refuse
) -> None:
    """Links stay links, sockets are left out, and nothing blocks on a pipe."""
    tree = bench.context / "tree"
    tree.mkdir()
    (tree / "out").symlink_to("/etc/shadow")
    os.mkfifo(tree / "pipe")
    (tree / "new\nline \udcff").write_text("odd")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree / "sock"))

    image = await bench.build("FROM busybox\nCOPY tree /t/\nRUN ls /t | wc -l > /n\n")

    assert bench.read(image, "n") == "3\n"
    assert bench.view(image).read("t/new\nline \udcff".encode("utf-8", "surrogateescape")) == b"odd"
    os.mknod(tree / "null", 0o020666, os.makedev(1, 3))
    assert await refuse("FROM busybox\nCOPY tree /t/\n") == "2: 'null' is a device; COPY takes none"


async def test_sparse_file_of_a_gibibyte_costs_its_blocks_only(bench: Bench) -> None:
    """A hole that became zeros would fill the store."""
    with (bench.context / "huge").open("wb") as file:
        file.write(b"begin")
        file.truncate(1 << 30)

    image = await bench.build("FROM scratch\nCOPY huge /\n")

    path = bench.store.layer_root(image.layers[0]) / "huge"
    assert (path.stat().st_size, path.stat().st_blocks < 1000) == (1 << 30, True)


async def test_file_of_absurd_size_is_refused_at_once(bench: Bench, refuse: Refuse) -> None:
    """It costs nothing to make and days to read."""
    with (bench.context / "huge").open("wb") as file:
        file.truncate(1 << 42)
    begun = time.perf_counter()

    assert "'huge' has 4398046511104 bytes" in await refuse("FROM busybox\nCOPY huge /\n")
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize("name", ["Dockerfile", ".dockerignore"])
def test_pipe_or_huge_file_in_place_of_ours_does_not_block(bench: Bench, name: str) -> None:
    """The builder reads these itself, before anything is in a sandbox."""
    if name != "Dockerfile":
        bench.write(Dockerfile="FROM busybox\n")
    path = bench.context / name
    os.mkfifo(path)
    with pytest.raises(ImageError, match="is no regular file"):
        check(bench.store, "x", bench.context)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(ImageError, match="bytes are too many"):
        check(bench.store, "x", bench.context)


@pytest.mark.parametrize(
    "line",
    [
        'COPY ["\\ud800", "/x"]',
        'COPY ["a\\u0000b", "/x"]',
        f"COPY {'n' * 300} /x",
        f"COPY file /{'n' * 300}/x",
        f"COPY file {'/n' * 3000}",
        f"WORKDIR {'n' * 300}",
        "COPY --from=scratch / /x",
        "RUN \0",
        f"RUN --mount=type=cache,target=/{'n' * 300} true",
        f"STOPSIGNAL {'9' * 5000}",
        f"COPY --from={'9' * 5000} /a /b",
        f"EXPOSE {'9' * 5000}",
        f"HEALTHCHECK --interval={'9' * 5000}s CMD a",
    ],
)
async def test_line_that_no_file_system_could_hold_is_an_error_with_its_number(
    bench: Bench, refuse: Refuse, line: str
) -> None:
    """One sentence, not a traceback."""
    bench.write(file="x")

    assert (await refuse(f"FROM busybox\n{line}\n")).startswith("2: ")


async def test_here_documents_that_grow_are_refused_before_they_fill_the_memory(
    bench: Bench, refuse: Refuse
) -> None:
    """Each one may hold a variable a thousand times."""
    one = f"COPY <<E /x\n{'$A' * 9}\nE\n"

    said = await refuse(f"FROM busybox\nARG A={'x' * 100_000}\n" + one * 30)

    assert "all here-documents together become more than" in said


async def test_output_of_a_failed_step_is_bounded(bench: Bench) -> None:
    """What a step prints is hostile, and may be anything."""
    with pytest.raises(DockerfileError) as caught:
        await bench.build("FROM busybox\nRUN yes | head -c 100000; echo last >&2; exit 1\n")
    assert len(str(caught.value)) < 2500
    assert str(caught.value).endswith("last")


async def test_step_cannot_reach_out_of_its_layer_by_a_link(bench: Bench, tmp_path: Path) -> None:
    """The builder tidies up in what the step wrote; it must follow nothing there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")

    await bench.build(
        "FROM busybox\n"
        "RUN --mount=type=cache,target=/a/b/file "
        f"rm -rf /a 2>/dev/null; mkdir -p /x; ln -s {outside} /x/b; rm -rf /a; ln -s /x /a\n"
    )

    assert (outside / "file").read_text() == "kept"
