"""Where cgroups may be made, on the shapes of machine that there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldframe.host import cgroups
from coldframe.protocol.errors import CapabilityError

V2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 24 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "35 24 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
)
HYBRID_OWN = "5:memory:/a/b\n4:cpu,cpuacct:/c\n3:pids:/\n1:name=systemd:/x\n0::/x\n"


def test_hierarchies_of_pure_v2_is_the_one_tree() -> None:
    """What most machines have."""
    found = cgroups.hierarchies(V2, "0::/user.slice/session-1.scope\n")

    assert found.keys() == {"unified"}
    assert found["unified"].own == Path("/sys/fs/cgroup/user.slice/session-1.scope")


def test_hierarchies_of_hybrid_finds_each_controller_where_we_are() -> None:
    """Our own cgroup differs from tree to tree."""
    found = cgroups.hierarchies(HYBRID, HYBRID_OWN)

    assert {name: str(tree.own) for name, tree in found.items()} == {
        "unified": "/sys/fs/cgroup/unified/x",
        "cpu": "/sys/fs/cgroup/cpu,cpuacct/c",
        "memory": "/sys/fs/cgroup/memory/a/b",
        "pids": "/sys/fs/cgroup/pids",
    }


def test_hierarchies_in_a_container_that_sees_a_part_of_the_tree() -> None:
    """A bind mount of a subtree: paths of /proc/self/cgroup begin above it."""
    mounts = "9 8 0:5 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"

    found = cgroups.hierarchies(mounts, "5:memory:/docker/abc/sub\n")

    assert found["memory"].own == Path("/sys/fs/cgroup/memory/sub")


class FakeTree:
    """A v2 tree of plain files whose busy cgroups refuse controllers, as the kernel's do."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.own = root, root
        monkeypatch.setattr(cgroups, "hierarchies", self._hierarchies)
        monkeypatch.setattr(cgroups, "_enable", self._enable)
        self.add("", procs="")

    def add(self, path: str, *, procs: str, controllers: str = "cpu memory pids") -> Path:
        cgroup = self.root / path
        cgroup.mkdir(exist_ok=True)
        (cgroup / "cgroup.controllers").write_text(controllers)
        (cgroup / "cgroup.subtree_control").write_text("")
        (cgroup / "cgroup.procs").write_text(procs)
        self.own = cgroup
        return cgroup

    def _hierarchies(self) -> dict[str, cgroups.Hierarchy]:
        return {"unified": cgroups.Hierarchy("unified", self.root, self.own)}

    def _enable(self, cgroup: Path, controllers: list[str]) -> None:
        if cgroup != self.root and (cgroup / "cgroup.procs").exists():
            leaf = cgroup / "coldframe.self"
            if (cgroup / "cgroup.procs").read_text().strip() and not leaf.exists():
                raise OSError(16, "Device or resource busy")
        (cgroup / "cgroup.subtree_control").write_text(" ".join(controllers))


def test_v2_own_cgroup_alone_steps_aside_into_a_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit with Delegate=yes: only we live there, so only we are moved."""
    tree = FakeTree(tmp_path, monkeypatch)
    own = tree.add("unit", procs=f"{os.getpid()}\n")

    made = cgroups.make_node_cgroups("abc123")

    assert made.paths == {"unified": own / "coldframe/abc123"}
    assert made.limits == {"cpu", "memory", "pids"}
    assert (own / "coldframe.self/cgroup.procs").read_text() == str(os.getpid())


def test_v2_second_node_of_a_process_is_made_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node a level deeper: after some, paths are too long and `gc` looks elsewhere."""
    tree = FakeTree(tmp_path, monkeypatch)
    own = tree.add("unit", procs="")
    tree.add("unit/coldframe.self", procs=f"{os.getpid()}\n")

    made = cgroups.make_node_cgroups("abc123")

    assert made.paths == {"unified": own / "coldframe/abc123"}


def test_v2_own_cgroup_shared_uses_the_slice_above_and_moves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login session holds a shell and sshd: they stay where they are."""
    tree = FakeTree(tmp_path, monkeypatch)
    slice_ = tree.add("user.slice", procs="")
    session = tree.add("user.slice/session", procs="1\n2\n")

    made = cgroups.make_node_cgroups("abc123")

    assert made.paths == {"unified": slice_ / "coldframe/abc123"}
    assert (session / "cgroup.procs").read_text() == "1\n2\n"


def test_v2_without_any_place_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without limits a fork bomb takes the machine."""
    tree = FakeTree(tmp_path, monkeypatch)
    (tmp_path / "cgroup.controllers").write_text("cpu")
    tree.add("shared", procs="1\n2\n")

    with pytest.raises(CapabilityError, match="Delegate=yes"):
        cgroups.make_node_cgroups("abc123")


def test_machine_without_v2_tree_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kill, freeze and clone-into need it."""
    monkeypatch.setattr(cgroups, "hierarchies", dict)

    with pytest.raises(CapabilityError, match="mount -t cgroup2"):
        cgroups.make_node_cgroups("abc123")
