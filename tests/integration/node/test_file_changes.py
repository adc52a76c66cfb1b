"""What became of a sandbox's files between two commands, told from what was written."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping

import pytest

from coldframe.images.base import Image
from coldframe.node import inside_calls
from coldframe.node.node import Node
from coldframe.protocol.errors import NotKnownError, SandboxGoneError
from coldframe.protocol.models import ExecRequest, FileChanges, SandboxSpec
from coldframe.runtimes import file_changes, file_index
from coldframe.runtimes.native_sandbox import NativeSandbox
from tests.integration.node.conftest import DEEP, peak_rss_bytes

pytestmark = pytest.mark.root

LIST = """
import hashlib, json, os, stat
def state(path):
    s = os.lstat(path)
    kind = stat.S_IFMT(s.st_mode)
    content, size = "", 0
    if stat.S_ISREG(s.st_mode):
        content, size = hashlib.sha256(open(path, "rb").read()).hexdigest(), s.st_size
    elif stat.S_ISLNK(s.st_mode):
        content = os.readlink(path)
    return [kind, stat.S_IMODE(s.st_mode), s.st_uid, s.st_gid, size, content]
found = {}
for top, names, files in os.walk("/etc"):
    found[top] = state(top)
    for name in (*names, *files):
        one = os.path.join(top, name)
        found[one] = state(one)
print(json.dumps(found))
"""
"""All that shows in /etc, as a program in the sandbox sees it."""

ACT = """
import os, random, shutil, sys
chance = random.Random(int(sys.argv[1]))
def anything(only=None):
    found = []
    for top, names, files in os.walk("/etc"):
        found += [os.path.join(top, name) for name in (*names, *files)]
    kept = [one for one in sorted(found) if only is None or only(one)]
    return chance.choice(kept or ["/etc/none"])
is_file = lambda path: os.path.isfile(path) and not os.path.islink(path)
is_directory = lambda path: os.path.isdir(path) and not os.path.islink(path)
def new():
    return os.path.join(anything(is_directory), chance.choice("abcdefgh"))
def remove(path):
    shutil.rmtree(path) if is_directory(path) else os.unlink(path)
def again(path):
    names = os.listdir(path)
    remove(path)
    os.mkdir(path)
    for name in names[: len(names) // 2]:
        write(os.path.join(path, name))
def write(path):
    with open(path, "ab" if chance.random() < 0.5 else "wb") as file:
        file.write(chance.randbytes(chance.randrange(40)))
def same(path):
    content = open(path, "rb").read()
    mode = os.stat(path).st_mode & 0o7777
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)
acts = [
    lambda: write(new()), lambda: write(anything(is_file)), lambda: same(anything(is_file)),
    lambda: os.utime(anything(), (1, 1)), lambda: os.chmod(anything(is_file), 0o600),
    lambda: os.chown(anything(), 7, 7, follow_symlinks=False), lambda: remove(anything()),
    lambda: os.mkdir(new()), lambda: os.rename(anything(), new()), lambda: os.symlink("x", new()),
    lambda: os.link(anything(is_file), new()), lambda: again(anything(is_directory)),
    lambda: shutil.copytree(anything(is_directory), new()),
    lambda: shutil.move(anything(is_directory), new()),
    lambda: (one := anything(is_directory), remove(one), write(one)),
    lambda: (one := anything(is_file), remove(one), os.mkdir(one)),
]
for _ in range(int(sys.argv[2])):
    try:
        chance.choice(acts)()
    except OSError:
        pass
"""
"""Things that programs do to the files of an image and to their own."""

States = Mapping[str, list[object]]


async def run(node: Node, sandbox: str, *argv: str) -> bytes:
    result = await node.exec(sandbox, ExecRequest(argv=argv))
    assert result.ok, result.stderr
    return result.out.window


async def listing(node: Node, sandbox: str) -> States:
    request = ExecRequest(argv=("python3", "-c", LIST), window_bytes=64 << 20)
    result = await node.exec(sandbox, request)
    assert result.ok, result.stderr
    found: States = json.loads(result.out.window)
    return found


def differences(before: States, after: States) -> dict[str, str]:
    """How two listings differ; what went with its directory is not named."""

    def directory(states: States, path: str) -> bool:
        return path in states and states[path][0] == 0o040000

    found = dict.fromkeys(after.keys() - before.keys(), "created")
    for path in before.keys() - after.keys():
        above = path.rpartition("/")[0]
        if directory(before, above) and directory(after, above):
            found[path] = "removed"
    common = before.keys() & after.keys()
    return found | {path: "changed" for path in common if before[path] != after[path]}


def told(found: FileChanges) -> dict[str, str]:
    assert found.left_out == 0
    return {os.fsdecode(one.path): one.change.value for one in found.entries}


@pytest.mark.parametrize("seed", range(3))
async def test_changes_are_those_that_a_program_inside_would_find(
    native_node: Node, debian_image: Image, seed: int
) -> None:
    """Of whatever was done to an image's files and to others: none is missed, none is made up."""
    sandbox = (await native_node.create_sandbox(SandboxSpec(image=debian_image.name))).id
    chance = random.Random(seed)
    fresh = before = await listing(native_node, sandbox)
    mark = (await native_node.changes(sandbox)).mark
    for _ in range(12):
        acts = str(chance.choice([0, 1, 5, 40]))
        await run(native_node, sandbox, "python3", "-c", ACT, str(chance.random())[2:8], acts)
        found = await native_node.changes(sandbox, mark)
        after = await listing(native_node, sandbox)
        assert told(found) == differences(before, after)
        for one in found.entries:
            if one.sha256 is not None:
                assert one.sha256 == after[os.fsdecode(one.path)][5]
        before, mark = after, found.mark
    whole = told(await native_node.changes(sandbox))
    assert {p: c for p, c in whole.items() if p.startswith("/etc")} == differences(fresh, before)


async def test_changes_of_a_deep_tree_cost_what_its_entries_do(
    native_node: Node, debian_image: Image
) -> None:
    """30,000 levels have paths of 60 KB: neither time nor memory nor the answer may grow so."""
    sandbox = (await native_node.create_sandbox(SandboxSpec(image=debian_image.name))).id
    mark = (await native_node.changes(sandbox)).mark
    await run(native_node, sandbox, "python3", "-c", DEEP, "30000")
    before, began = peak_rss_bytes(), time.process_time()
    found = await native_node.changes(sandbox, mark)

    assert found.created == 30_001
    assert 0 < len(found.entries) < 1_000
    assert sum(len(one.path) for one in found.entries) <= file_changes.MOST_PATH_BYTES
    assert peak_rss_bytes() - before < 64 << 20
    await run(native_node, sandbox, "rm", "-r", "/srv/d")
    gone = await native_node.changes(sandbox, found.mark)
    assert told(gone) == {"/srv/d": "removed"}
    assert time.process_time() - began < 5


async def test_tree_that_is_too_large_to_tell_is_not_known(
    native_node: Node, debian_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded in time and in what is kept; what is too much says so, and the mark stays good."""
    sandbox = (await native_node.create_sandbox(SandboxSpec(image=debian_image.name))).id
    mark = (await native_node.changes(sandbox)).mark
    await run(native_node, sandbox, "sh", "-c", "cd /srv && seq 2000 | xargs touch")
    with monkeypatch.context() as small:
        small.setattr(file_index, "MOST_BYTES", 10_000)
        with pytest.raises(NotKnownError, match="more files"):
            await native_node.changes(sandbox, mark)
    with monkeypatch.context() as small:
        small.setattr(inside_calls, "CHANGES_S", 0.0)
        with pytest.raises(NotKnownError, match="within 0 s"):
            await native_node.changes(sandbox, mark)
    assert (await native_node.changes(sandbox, mark)).created == 2000


async def test_changes_are_told_while_files_come_and_go(
    native_node: Node, debian_image: Image
) -> None:
    """Agents leave builds and servers running; a look must not need them to be still."""
    sandbox = (await native_node.create_sandbox(SandboxSpec(image=debian_image.name))).id
    restless = (
        "cd /srv; echo > ready; while :; do mkdir -p a/b/c; touch a/b/c/f a/g; ln -sf /etc a/l;"
        " mkfifo a/p; mv a/b b; rm -rf a b; done"
    )
    begun = await native_node.start_exec(sandbox, ExecRequest(command=restless))
    mark = (await native_node.changes(sandbox)).mark
    for number in range(50):
        await run(native_node, sandbox, "sh", "-c", f"echo {number} > /root/result")
        found = await native_node.changes(sandbox, mark)
        assert b"/root/result" in {one.path for one in found.entries}
        outside = {one.path for one in found.entries if not one.path.startswith(b"/srv")}
        assert outside == {b"/root/result"}
        mark = found.mark
    await native_node.kill_processes(sandbox, begun)


async def test_disk_that_is_full_keeps_the_mark_that_was_there(
    native_node: Node, debian_image: Image
) -> None:
    """What cannot be kept is told again at the next look, and not lost."""
    spec = SandboxSpec(image=debian_image.name, disk_bytes=32 << 20)
    sandbox = (await native_node.create_sandbox(spec)).id
    mark = (await native_node.changes(sandbox)).mark
    await run(native_node, sandbox, "sh", "-c", "cd /srv && seq 500 | xargs touch")
    fill = "cat /dev/zero > /srv/zeros; :"
    await native_node.exec(sandbox, ExecRequest(command=fill))
    full = await native_node.changes(sandbox, mark)
    assert full.created == 501
    if full.mark != mark:
        pytest.fail("the disk had room for another index")
    await run(native_node, sandbox, "rm", "/srv/zeros")
    assert (await native_node.changes(sandbox, mark)).created == 500


async def test_marks_are_kept_by_their_number_and_not_for_ever(
    native_node: Node, spec: SandboxSpec
) -> None:
    """A look whose answer was lost can be asked for again; old ones take no room."""
    sandbox = (await native_node.create_sandbox(spec)).id
    marks = [(await native_node.changes(sandbox)).mark]
    for number in range(6):
        await native_node.exec(sandbox, ExecRequest(command=f"echo {number} > /f{number}"))
        marks.append((await native_node.changes(sandbox, marks[-1])).mark)
    assert (await native_node.changes(sandbox, marks[-4])).created == 3
    for old in (*marks[:2], "../upper", "\udcff"):
        with pytest.raises(NotKnownError, match="is not kept"):
            await native_node.changes(sandbox, old)
    assert (await native_node.changes(sandbox, marks[-1])).total == 0


async def test_look_that_waits_while_its_sandbox_is_deleted_finds_it_gone(
    native_node: Node, busybox_image: Image
) -> None:
    """Looks at one sandbox come one after another; what the first leaves may be nothing."""
    sandbox = (await native_node.create_sandbox(SandboxSpec(image=busybox_image.name))).id
    handle = native_node._works.register.find(sandbox).handle
    assert isinstance(handle, NativeSandbox)
    async with handle._looking:
        look = asyncio.ensure_future(native_node.changes(sandbox))
        await asyncio.sleep(0)  # it waits
        await native_node.delete(sandbox)
    with pytest.raises(SandboxGoneError):
        await look
