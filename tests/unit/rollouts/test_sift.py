"""What an archive of an agent's may carry into the sandbox that grades it."""

from __future__ import annotations

import contextlib
import io
import tarfile
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.protocol.errors import FileError
from coldframe.rollouts.artifacts import Artifact
from coldframe.rollouts.sift import Sifted

LATER = time.monotonic() + 3600


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tuple:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o644
    return info, b"x" * size


def archive(*members: tuple) -> io.BytesIO:
    """Write an archive as it stands: no name is checked or changed on the way."""
    content = io.BytesIO()
    for info, data in members:
        content.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        content.write(data + bytes(-len(data) % 512))
    content.write(bytes(1024))
    content.seek(0)
    return content


def sifted(
    content: io.BytesIO, source: str = "/srv/out", most: int = 100, **declared: object
) -> tuple[Sifted, list[str], bool]:
    """Return what was decided, and the names that came out."""
    sift = Sifted(Artifact(source, **declared), directory=True, most=most)  # type: ignore[arg-type]
    out = io.BytesIO()
    whole = sift.run(content, out, LATER)
    out.seek(0)
    with tarfile.open(fileobj=out) as passed:
        return sift, passed.getnames(), whole


REFUSED = {
    "absolute name": member("/etc/passwd"),
    "name that climbs": member("a/../../etc/passwd"),
    "absolute link": member("a", tarfile.SYMTYPE, "/tests"),
    "link that climbs out": member("d/a", tarfile.SYMTYPE, "../../tests"),
    "link that climbs in the middle": member("d/e/a", tarfile.SYMTYPE, "x/../../../tests"),
    "hard link to nothing": member("a", tarfile.LNKTYPE, "b"),
    "hard link outside": member("a", tarfile.LNKTYPE, "/etc/shadow"),
    "fifo": member("a", tarfile.FIFOTYPE),
    "device": member("a", tarfile.CHRTYPE),
    "block device": member("a", tarfile.BLKTYPE),
    "unknown kind": member("a", b"Z"),
}


@pytest.mark.parametrize("hostile", REFUSED.values(), ids=REFUSED.keys())
def test_hostile_member_is_left_out_and_told(hostile: tuple) -> None:
    """The rest travels: an agent must not choose what is judged by adding a member."""
    sift, names, whole = sifted(archive(member("good", size=3), hostile, member("other")))

    assert (names, whole) == (["good", "other"], True)
    assert [path for path, _ in sift.refused] == [f"/srv/out/{hostile[0].name}"]


def test_fit_members_keep_their_content_and_order() -> None:
    """The control: files, directories, links that stay inside, hard links to what travels."""
    fit = [
        member("d", tarfile.DIRTYPE),
        member("d/file", size=700),
        member("d/up", tarfile.SYMTYPE, "../top"),
        member("top", size=1),
        member("again", tarfile.LNKTYPE, "d/file"),
        member("n" * 300, size=2),
    ]
    sift, names, whole = sifted(archive(*fit))

    assert whole
    assert names == [info.name for info, _ in fit]
    assert [one.size for one in sift.entries] == [0, 700, 0, 1, 0, 2]
    assert sift.refused == []


def test_the_verifiers_own_places_never_travel() -> None:
    """Whatever an artifact covers, a reward or a test does not come with it."""
    members = [
        member("verifier", tarfile.DIRTYPE),
        member("verifier/reward.txt", size=1),
        member("agent/log", size=1),
    ]
    _, names, _ = sifted(archive(*members), source="/logs")

    assert names == ["agent/log"]


def test_excluded_members_are_left_out_without_a_word() -> None:
    """The task's author knows; a hard link to one is told, for its content is missing."""
    members = [member("a.pyc", size=1), member("keep"), member("b", tarfile.LNKTYPE, "a.pyc")]
    sift, names, _ = sifted(archive(*members), exclude=("*.pyc",))

    assert names == ["keep"]
    assert [path for path, _ in sift.refused] == ["/srv/out/b"]


def test_what_lies_in_an_excluded_directory_is_left_out() -> None:
    """Names that merely begin alike are another's."""
    members = [
        member("d/cache", tarfile.DIRTYPE),
        member("d/cache/a/b"),
        member("d/cache-of-mine"),
        member("d/z"),
    ]
    _, names, _ = sifted(archive(*members), exclude=("cache",))

    assert names == ["d/cache-of-mine", "d/z"]


def test_deep_names_are_sifted_quickly() -> None:
    """An agent that makes them must not keep everybody's processor busy for minutes."""
    deep = "/".join(["ab"] * 500)
    members = [member(f"{deep}/{number}") for number in range(200)]
    begun = time.process_time()
    _, names, _ = sifted(archive(*members), most=1000, exclude=("*.pyc", "a*b*c*x", "build?"))

    assert len(names) == 200
    assert time.process_time() - begun < 5  # 0.2 s; trying each part with each took 60 s


def test_refused_members_count_too() -> None:
    """Memory is bounded whatever is in the archive."""
    links = [member(str(number), tarfile.SYMTYPE, "/etc") for number in range(6)]
    _, _, whole = sifted(archive(member("good"), *links), most=5)

    assert not whole


def test_path_that_no_program_can_open_is_refused() -> None:
    """It could not be put where it belongs."""
    sift, names, whole = sifted(archive(member("/".join(["n" * 200] * 25)), member("good")))

    assert (names, whole) == (["good"], True)
    assert "5033 bytes" in sift.refused[0][1]


def test_too_many_members_are_refused_as_a_whole() -> None:
    """Half of an artifact would be judged as if it were all of it."""
    _, _, whole = sifted(archive(*(member(str(n)) for n in range(6))), most=5)

    assert not whole


@pytest.mark.parametrize("kept", [512, 1536, 1800, 2048])
def test_archive_that_is_cut_is_refused(kept: int) -> None:
    """Half of what an agent made must not be judged as all of it."""
    whole = archive(member("a", size=600), member("b", size=3))
    with pytest.raises(FileError, match="cut short"):
        sifted(io.BytesIO(whole.getvalue()[:kept]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4096))
def test_any_bytes_are_an_archive_or_a_typed_error(content: bytes) -> None:
    """What comes from a sandbox must not crash what grades."""
    with contextlib.suppress(FileError):
        Sifted(Artifact("/srv/out"), True, 10).run(io.BytesIO(content), io.BytesIO(), LATER)


def test_archive_is_left_when_its_time_is_over() -> None:
    """An agent may make more members than anybody can read."""
    sift = Sifted(Artifact("/srv/out"), directory=True, most=100)
    assert not sift.run(archive(member("a"), member("b")), io.BytesIO(), time.monotonic() - 1)
    assert sift.entries == []
