"""Checks of a runtime: files, also those that a hostile sandbox lays out."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator

from coldframe.protocol.errors import (
    FileError,
    InvalidRequestError,
    PathExistsError,
    PathNotFoundError,
    PathRefusedError,
)
from coldframe.protocol.models import FileKind
from coldframe.runtimes.self_check_lab import Bench, Checks, Lab, equal, expect, pieces, raises

check = Checks()
MIB = 1 << 20


async def _drain(content: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in content])


async def _names(bench: Bench, path: str = "/work") -> list[bytes]:
    return sorted(entry.name for entry in await bench.files.list(path))


@check()
async def content_goes_in_and_comes_out(lab: Lab) -> None:
    """By the file API and by commands, they are the same files."""
    async with lab.sandbox() as bench:
        data = bytes(range(256)) * 12 * 1024 + b"end"
        size = await bench.files.write(
            "/work/f", pieces(data[:10], data[10 : 2 * MIB], data[2 * MIB :])
        )
        equal(size, len(data), "size that write returned")
        expect(await bench.read("/work/f") == data, "content read back differs")
        sizes = [len(piece) async for piece in bench.files.read("/work/f")]
        expect(max(sizes) <= MIB, f"a piece of {max(sizes)} bytes")
        equal((await bench.run("wc -c < f")).text.strip(), str(len(data)), "size inside")
        await bench.run("printf inside > g")
        equal(await bench.read("/work/g"), b"inside", "what a command wrote")


@check()
async def ranges_are_exact(lab: Lab) -> None:
    """Offset and length, over the end too."""
    async with lab.sandbox() as bench:
        await bench.write("f", b"0123456789")
        equal(await bench.read("/work/f", offset=3, length=4), b"3456", "a range")
        equal(await bench.read("/work/f", offset=8, length=100), b"89", "a range over the end")
        equal(await bench.read("/work/f", offset=100), b"", "a range behind the end")


@check()
async def failed_write_changes_nothing(lab: Lab) -> None:
    """The old content stays until the new is whole; no temporary name is left."""
    async with lab.sandbox() as bench:
        await bench.write("f", b"old", mode=0o600)

        async def breaks() -> AsyncIterator[bytes]:
            yield b"new"
            raise ConnectionError("the sender went away")

        await raises(ConnectionError, bench.files.write("/work/f", breaks()), "a broken write")
        equal(await bench.read("/work/f"), b"old", "content after a broken write")
        equal(await _names(bench), [b"f"], "names after a broken write")


@check()
async def overwriting_keeps_mode(lab: Lab) -> None:
    """`mode` is that of a new file; a script stays executable."""
    async with lab.sandbox() as bench:
        await bench.write("f", b"old", mode=0o750)
        equal((await bench.files.stat("/work/f")).mode, 0o750, "mode of a new file")
        await bench.write("f", b"new", mode=0o600)
        equal((await bench.files.stat("/work/f")).mode, 0o750, "mode of an overwritten file")


@check()
async def parents_are_made_or_missed(lab: Lab) -> None:
    """`parents` decides."""
    async with lab.sandbox() as bench:
        await bench.files.write("/work/a/b/f", pieces(b"x"))
        equal(await _names(bench, "/work/a"), [b"b"], "made parents")
        write = bench.files.write("/work/c/f", pieces(b"x"), parents=False)
        await raises(PathNotFoundError, write, "write without parents")


@check()
async def stat_tells_kinds_and_targets(lab: Lab) -> None:
    """Links are told from what they lead to."""
    async with lab.sandbox() as bench:
        await bench.write("f", b"12345")
        await bench.run("mkdir d; mkfifo p; ln -s f l; ln -s nowhere broken")
        kinds = {entry.name: entry.stat.kind for entry in await bench.files.list("/work")}
        wanted = {
            b"f": FileKind.FILE,
            b"d": FileKind.DIRECTORY,
            b"p": FileKind.FIFO,
            b"l": FileKind.LINK,
            b"broken": FileKind.LINK,
        }
        equal(kinds, wanted, "kinds")
        followed = await bench.files.stat("/work/l")
        equal((followed.kind, followed.size), (FileKind.FILE, 5), "a followed link")
        link = await bench.files.stat("/work/l", follow=False)
        equal((link.kind, link.target), (FileKind.LINK, b"f"), "a link")
        await raises(PathNotFoundError, bench.files.stat("/work/broken"), "a broken link")
        await raises(PathNotFoundError, bench.files.stat("/work/no"), "a missing path")


@check()
async def names_may_be_any_bytes(lab: Lab) -> None:
    """Newlines, not UTF-8, and a leading dash."""
    async with lab.sandbox() as bench:
        names = [b"-rf", b"a\nb", b"\xff\xfe"]
        for name in names:
            await bench.files.write(b"/work/" + name, pieces(name))
        equal(await _names(bench), names, "names in the list")
        equal(await bench.read(b"/work/\xff\xfe"), b"\xff\xfe", "content by an odd name")


@check()
async def directories_are_made_moved_and_removed(lab: Lab) -> None:
    """mkdir, move, remove, and what each refuses."""
    async with lab.sandbox() as bench:
        files = bench.files
        await files.mkdir("/work/a/b", mode=0o711)
        equal((await files.stat("/work/a/b")).mode, 0o711, "mode of a new directory")
        await files.mkdir("/work/a/b")
        await raises(PathExistsError, files.mkdir("/work/a/b", exist_ok=False), "mkdir again")
        await raises(PathNotFoundError, files.mkdir("/work/x/y", parents=False), "no parents")
        await bench.write("a/b/f", b"x")
        await raises(PathExistsError, files.mkdir("/work/a/b/f"), "mkdir over a file")
        await files.move("/work/a/b", "/work/moved")
        equal(await bench.read("/work/moved/f"), b"x", "content after move")
        await raises(PathNotFoundError, files.move("/work/no", "/work/x"), "move of nothing")
        await raises(PathExistsError, files.remove("/work/moved"), "remove of a full directory")
        await files.remove("/work/moved", recursive=True)
        await files.remove("/work/a")
        await raises(PathNotFoundError, files.remove("/work/a"), "remove of nothing")
        equal(await _names(bench), [], "names in the end")


@check()
async def chmod_changes_the_mode(lab: Lab) -> None:
    """All twelve bits but what the kernel takes back."""
    async with lab.sandbox() as bench:
        await bench.write("f", b"#!/bin/sh\necho ran\n")
        await bench.files.chmod("/work/f", 0o755)
        equal((await bench.files.stat("/work/f")).mode, 0o755, "mode")
        equal(
            (await bench.run(argv=("./f",))).stdout, b"ran\n", "output of what was made a program"
        )


@check("users")
async def owners_are_the_sandboxes_own(lab: Lab) -> None:
    """Ids inside, not the host's; parents belong to the owner too."""
    async with lab.sandbox() as bench:
        await bench.files.write("/work/d/f", pieces(b"x"), owner=(1234, 99))
        result = await bench.run("stat -c '%u %g' d d/f")
        equal(result.text, "1234 99\n1234 99\n", "owners inside")
        await bench.files.chown("/work/d/f", 0, 0)
        stat = await bench.files.stat("/work/d/f")
        equal((stat.uid, stat.gid), (0, 0), "owner after chown")
        await raises(InvalidRequestError, bench.files.chown("/work/d/f", 1 << 20, 0), "a far id")


@check()
async def path_must_be_absolute(lab: Lab) -> None:
    """There is no current directory in the file API."""
    async with lab.sandbox() as bench:
        await raises(InvalidRequestError, bench.files.stat("relative"), "a relative path")
        await raises(InvalidRequestError, bench.files.stat("/a\0b"), "a path with a NUL")


# --- hostile --------------------------------------------------------------------------


@check()
async def links_stay_inside_the_root(lab: Lab) -> None:
    """An absolute link, and one of many `..`, lead to the sandbox's own files."""
    async with lab.sandbox() as bench:
        await bench.files.write("/inside", pieces(b"sandbox"))
        up = "../" * 40
        await bench.run(f"ln -s /inside abs; ln -s {up}inside up; ln -s /proc/self/root/etc magic")
        equal(await bench.read("/work/abs"), b"sandbox", "an absolute link")
        equal(await bench.read("/work/up"), b"sandbox", "a link of many ..")
        equal(await bench.read("/work/../../../inside"), b"sandbox", "a path of many ..")
        await raises(FileError, bench.files.stat("/work/magic/passwd"), "a magic link")


@check()
async def loops_of_links_end(lab: Lab) -> None:
    """Or they would hold a thread for ever."""
    async with lab.sandbox() as bench:
        await bench.run("ln -s b a; ln -s a b")
        await raises(FileError, bench.files.stat("/work/a"), "a loop")


@check()
async def what_could_block_is_refused(lab: Lab) -> None:
    """A FIFO without a writer, a directory; the host's thread must never wait."""
    async with lab.sandbox() as bench:
        await bench.run("mkfifo p; mkdir d")
        await raises(PathRefusedError, bench.read("/work/p"), "reading a FIFO")
        write = bench.files.write("/work/p", pieces(b"x"))
        await raises(PathRefusedError, write, "writing to a FIFO")
        await raises(PathExistsError, bench.read("/work/d"), "reading a directory")


@check("isolation")
async def pseudo_file_systems_are_refused(lab: Lab) -> None:
    """/proc, /sys and /dev act when they are touched; commands may, the file API does not."""
    async with lab.sandbox() as bench:
        for path in ("/proc/self/environ", "/proc/1/root/etc", "/dev/null", "/sys/kernel"):
            await raises(FileError, bench.read(path), f"reading {path}")
        write = bench.files.write("/proc/sys/kernel/hostname", pieces(b"x"))
        await raises(FileError, write, "writing to /proc")


@check()
async def racing_renames_never_lead_out(lab: Lab) -> None:
    """A directory that turns into a link to / and back is resolved inside, whenever."""
    async with lab.sandbox() as bench:
        await bench.files.write("/outside/f", pieces(b"root"))
        await bench.files.write("/work/real/f", pieces(b"work"))
        await bench.start(
            "ln -s /outside link; while :; do mv -T real x && mv -T link real; "
            "mv -T real link; mv -T x real; done"
        )
        for _ in range(200):
            try:
                content = await bench.read("/work/real/f")
            except FileError:
                continue
            expect(content in {b"root", b"work"}, f"read {content!r}")


# --- tar ------------------------------------------------------------------------------


@check()
async def tar_keeps_a_tree(lab: Lab) -> None:
    """Modes, links, hard links, odd names and empty directories come back."""
    async with lab.sandbox() as bench:
        await bench.run(
            "mkdir -p t/empty t/d; printf x > t/d/f; chmod 751 t/d/f; ln -s d/f t/l; "
            "ln t/d/f t/hard; printf n > \"$(printf 't/a\\nb')\"; mkfifo t/p"
        )
        archive = await _drain(bench.files.tar_down("/work/t"))
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            names = sorted(member.name.removeprefix("./") for member in members)
        wanted = ["a\nb", "d", "d/f", "empty", "hard", "l"]
        equal([name for name in names if name not in {"", "."}], wanted, "names in the archive")
        count = await bench.files.tar_up("/work/u", pieces(archive[:700], archive[700:]))
        expect(count >= len(wanted), f"{count} members were unpacked")
        stat = await bench.files.stat("/work/u/d/f")
        equal((stat.mode, stat.nlink), (0o751, 2), "mode and links of a file")
        equal((await bench.files.stat("/work/u/l", follow=False)).target, b"d/f", "link")
        equal(await bench.read("/work/u/a\nb"), b"n", "content by an odd name")


def _archive(*members: tuple[str, bytes, bytes]) -> bytes:
    """An archive of (name, type, content or link)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content.decode()
                archive.addfile(member)
    return buffer.getvalue()


@check()
async def tar_that_would_leave_is_refused(lab: Lab) -> None:
    """By `..`, by an absolute name, and through a link that it brought itself."""
    async with lab.sandbox() as bench:
        hostile = {
            "..": _archive(("../evil", tarfile.REGTYPE, b"x")),
            "absolute": _archive(("/evil", tarfile.REGTYPE, b"x")),
            "link": _archive(("out", tarfile.SYMTYPE, b"/"), ("out/evil", tarfile.REGTYPE, b"x")),
            "hard link": _archive(("evil", tarfile.LNKTYPE, b"../../etc/passwd")),
        }
        for what, archive in hostile.items():
            unpack = bench.files.tar_up("/work/u", pieces(archive))
            await raises(FileError, unpack, f"a member that leaves by {what}")
            for path in ("/evil", "/work/evil"):
                await raises(PathNotFoundError, bench.files.stat(path), f"{path} by {what}")


@check()
async def tar_that_is_cut_is_refused(lab: Lab) -> None:
    """A broken upload is not taken for a whole one."""
    async with lab.sandbox() as bench:
        archive = _archive(("f", tarfile.REGTYPE, b"x" * 5000))
        await raises(FileError, bench.files.tar_up("/work/u", pieces(archive[:2000])), "a cut tar")
