"""`coldframe ledger` and `coldframe gc` on nodes of which only traces are left.

The traces are made by hand, each of one kind: so that each is found for itself, and what
belongs to a live node is seen to be left alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldframe import SandboxClient
from coldframe.host import census, cgroups, tally
from coldframe.host.reaping import reap_cgroups
from coldframe.images.base import ImageConfig
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_node_id, new_sandbox_id
from coldframe.rollouts.scratch import PREFIX, scratch
from tests.fixtures.service import serving

pytestmark = pytest.mark.root


@dataclass
class Machine:
    """A home of its own, and the command line looking at it."""

    home: Path
    node_id: str
    sandbox_id: str
    cleanup: ExitStack

    @property
    def scratch(self) -> Path:
        """Where processes of this machine put what lasts as long as they do."""
        return self.home / "tmp"

    @property
    def node(self) -> Path:
        """The node's directory."""
        return self.home / "nodes" / self.node_id

    def coldframe(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Run a command with --json; return its exit code and what it printed."""
        ended = subprocess.run(
            [sys.executable, "-m", "coldframe.cli.main", *arguments, "--json"],
            env={**os.environ, "COLDFRAME_HOME": str(self.home), "TMPDIR": str(self.scratch)},
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert ended.stderr == b""
        return ended.returncode, json.loads(ended.stdout)

    def leave_directory(self) -> str:
        """Leave the upper of a sandbox."""
        upper = self.node / "uppers" / self.sandbox_id
        upper.mkdir(parents=True)
        (upper / "file").write_text("left")
        return self.sandbox_id

    def leave_cgroup(self) -> str:
        """Leave an empty cgroup of a sandbox in every hierarchy."""
        made = cgroups.make_node_cgroups(self.node_id)
        self.cleanup.callback(reap_cgroups, list(made.paths.values()))
        for path in made.paths.values():
            (path / self.sandbox_id).mkdir()
        return str(made.paths["unified"] / self.sandbox_id)

    def leave_process(self) -> subprocess.Popen[bytes]:
        """Leave a process in the cgroup of a sandbox."""
        cgroup = Path(self.leave_cgroup())
        process = subprocess.Popen(["sleep", "600"])
        self.cleanup.callback(process.wait)
        self.cleanup.callback(process.kill)
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        return process

    def leave_mount(self) -> str:
        """Leave a mount below the node's directory."""
        point = self.node / "uppers" / self.sandbox_id
        point.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], check=True)
        self.cleanup.callback(
            subprocess.run, ["umount", "-l", point], stderr=subprocess.DEVNULL, check=False
        )
        return str(point)

    def count(self, **counts: int) -> None:
        """Count as the node would have."""
        tally.Tally(self.node / tally.FILE).update(counts)

    def hold(self) -> None:
        """Be the live owner of the node."""
        fd = os.open(self.node / "lock", os.O_RDWR | os.O_CREAT)
        self.cleanup.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine on which one node has been, and died."""
    node_id = new_node_id()
    with ExitStack() as cleanup:
        made = Machine(tmp_path / secrets.token_hex(3), node_id, new_sandbox_id(node_id), cleanup)
        made.node.mkdir(parents=True)
        (made.node / "lock").touch()
        (made.node / "spool").mkdir()
        made.scratch.mkdir()
        yield made


def _assert_found_and_reaped(machine: Machine, trace: str) -> None:
    code, ledger = machine.coldframe("ledger")
    assert code == 1
    assert ledger["leaked"] == len(ledger["leaks"]) > 0
    assert any(trace in leak for leak in ledger["leaks"])

    code, planned = machine.coldframe("gc", "--dry-run")
    assert code == 0
    assert any(trace in line for line in planned["would_reap"])
    assert machine.node.exists()

    code, done = machine.coldframe("gc")
    assert (code, done["remaining"]) == (0, [])
    assert any(trace in line for line in done["reaped"])
    reaped = {line for line in done["reaped"] if line.startswith("cgroup ")}
    assert reaped == {leak for leak in ledger["leaks"] if leak.startswith("cgroup ")}

    code, ledger = machine.coldframe("ledger")
    assert (code, ledger["leaked"], ledger["balanced"]) == (0, 0, True)
    assert not machine.node.exists()


def test_gc_finds_a_directory_of_a_dead_node(machine: Machine) -> None:
    """Uppers fill the disk, and nobody looks there."""
    _assert_found_and_reaped(machine, machine.leave_directory())


def test_gc_finds_a_cgroup_of_a_dead_node(machine: Machine) -> None:
    """Cgroups without processes cost kernel memory and are in no process list."""
    _assert_found_and_reaped(machine, machine.leave_cgroup())


def test_gc_finds_and_kills_a_process_of_a_dead_node(machine: Machine) -> None:
    """A survivor takes CPU from every later attempt."""
    process = machine.leave_process()

    _assert_found_and_reaped(machine, machine.sandbox_id)

    assert process.wait(10) == -9


def test_gc_finds_a_mount_of_a_dead_node(machine: Machine) -> None:
    """A mount keeps its file system busy, and its directory cannot be removed."""
    point = machine.leave_mount()

    _assert_found_and_reaped(machine, point)

    assert point not in Path("/proc/self/mountinfo").read_text()


def test_gc_leaves_a_live_node_alone(machine: Machine) -> None:
    """To reap a running batch would be worse than any leak."""
    machine.leave_directory()
    process = machine.leave_process()
    machine.count(created=3, deleted=2)
    machine.hold()

    code, ledger = machine.coldframe("ledger")
    assert (code, ledger["live"], ledger["leaked"]) == (0, 1, 0)
    assert ledger["nodes"] == [
        {
            "id": machine.node_id,
            "alive": True,
            "waits": False,
            "sandboxes": [machine.sandbox_id],
        }
    ]

    assert machine.coldframe("gc") == (0, {"reaped": [], "remaining": []})
    assert process.poll() is None
    assert (machine.node / "uppers" / machine.sandbox_id / "file").read_text() == "left"


def test_ledger_finds_what_cannot_belong_to_a_live_node(machine: Machine) -> None:
    """A node that does not answer: its sandboxes are its own to judge, all else is not."""
    cgroup = Path(machine.leave_cgroup())
    machine.leave_directory()
    (cgroup.parent / "sb-leak").mkdir()
    (machine.node / "uppers" / "stray").mkdir()
    machine.hold()

    code, ledger = machine.coldframe("ledger")
    found = [f"cgroup {cgroup.parent / 'sb-leak'}", "upper stray"]
    assert (code, ledger["live"], ledger["leaks"]) == (1, 0, found)
    assert machine.coldframe("gc") == (0, {"reaped": [], "remaining": []})


def test_ledger_asks_the_node_that_serves_what_it_has_leaked(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """Only it knows which of its sandboxes should be there; the table of all nodes says so too."""
    images = image_store.layers_directory.parent
    with serving(tmp_path, "native", images=images) as service:
        with SandboxClient(url=service.unix) as client:
            box = client.create_sandbox("busybox")
            node_id = box.info.node_id
            machine = Machine(service.home, node_id, new_sandbox_id(node_id), ExitStack())
            assert machine.coldframe("ledger")[1]["leaked"] == 0
            cgroup = next(iter(census.node_cgroups(node_id))) / machine.sandbox_id
            cgroup.mkdir()
            upper = machine.node / "uppers" / machine.sandbox_id
            upper.mkdir(parents=True)
            try:
                code, told = machine.coldframe("ledger")
                assert client.ledger().leaks == tuple(told["leaks"])
            finally:
                cgroup.rmdir()
                upper.rmdir()
        assert (code, told["leaks"]) == (1, [f"cgroup {cgroup}", f"upper {machine.sandbox_id}"])
        assert machine.coldframe("ledger")[0] == 0


def test_gc_drops_layers_that_no_image_needs(machine: Machine, tmp_path: Path) -> None:
    """`image rm` of an image in use promises that."""
    with ImageStore(machine.home / "images") as store, store.workspace() as work:
        layers = []
        for name in ("kept", "unneeded"):
            (work / name).mkdir()
            (work / name / "file").write_text(name)
            layers.append(store.add_layer(work / name))
        store.tag("kept", layers[:1], ImageConfig())

        held = machine.coldframe("gc")[1]["reaped"]
    assert not [line for line in held if line.startswith("layer")]

    code, planned = machine.coldframe("gc", "--dry-run")
    assert (code, planned["would_reap"]) == (0, [f"layer {layers[1]}"])
    code, done = machine.coldframe("gc")
    assert (code, done["reaped"]) == (0, [f"layer {layers[1]}"])
    left = [path.name for path in (machine.home / "images" / "layers").iterdir()]
    assert left == layers[:1]


def test_gc_finds_what_killed_runs_held_on_this_machine(machine: Machine) -> None:
    """Tests that nobody may see, and files of sandboxes, would lie in /tmp for ever."""
    machine.hold()
    with scratch(machine.scratch) as live:
        left = machine.scratch / f"{PREFIX}dead"
        left.mkdir()
        (left / "test.sh").write_text("hidden")

        planned = machine.coldframe("gc", "--dry-run")
        assert planned == (0, {"would_reap": [f"scratch {left}"], "remaining": []})
        assert left.exists()
        done = machine.coldframe("gc")
        assert done == (0, {"reaped": [f"scratch {left}"], "remaining": []})
        assert list(machine.scratch.iterdir()) == [live]


def test_ledger_keeps_the_counts_of_nodes_that_have_ended(machine: Machine) -> None:
    """What was alive when its node was killed is lost, once, and is never forgotten."""
    machine.count(created=9, deleted=4, expired=1, failed=1)
    lost = {"created": 9, "deleted": 4, "expired": 1, "failed": 1, "lost": 3, "live": 0}

    before = machine.coldframe("ledger")[1]
    machine.coldframe("gc")
    machine.coldframe("gc")
    after = machine.coldframe("ledger")[1]

    assert {name: before[name] for name in lost} == lost
    assert {name: after[name] for name in lost} == lost
    assert (before["balanced"], after["balanced"]) == (False, True)


def test_gc_does_not_judge_nodes_of_another_home(machine: Machine) -> None:
    """Their lock lies where we cannot see it: they may be alive."""
    process = machine.leave_process()
    machine.home = machine.home.with_name("another")

    code, ledger = machine.coldframe("ledger")

    assert (code, ledger["leaked"]) == (0, 0)
    assert machine.sandbox_id in ledger["elsewhere"]
    assert machine.coldframe("gc")[1]["reaped"] == []
    assert process.poll() is None


def test_gc_on_a_full_disk_makes_room_before_it_counts(machine: Machine) -> None:
    """What fills the disk may be what the dead node left: counting it first needs room."""
    machine.home.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", machine.home], check=True)
    machine.cleanup.callback(subprocess.run, ["umount", "-l", machine.home], check=True)
    machine.node.mkdir(parents=True)
    (machine.node / "lock").touch()
    machine.count(created=1)
    machine.leave_directory()
    with pytest.raises(OSError, match="No space left"):
        (machine.node / "uppers/big").write_bytes(bytes(1 << 20))

    code, done = machine.coldframe("gc")

    assert (code, machine.node.exists()) == (0, False), done
    assert machine.coldframe("ledger")[1]["created"] == 1
