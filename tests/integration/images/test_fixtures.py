"""The images that every other room's tests run on."""

from __future__ import annotations

import subprocess

from coldframe.images.base import Image
from coldframe.images.digest import digest_tree
from coldframe.images.store import ImageStore


def test_empty_image_holds_one_program_and_nothing_else(
    image_store: ImageStore, empty_image: Image
) -> None:
    """A runtime that needs a shell, /tmp or /etc/passwd must fail on it, and it would not if
    one were there."""
    root = image_store.layer_root(empty_image.layers[0])

    assert [path.name for path in root.iterdir()] == ["hello"]
    assert subprocess.check_output([root / "hello", "a", "b"]) == b"a b\n"


def test_musl_image_brings_its_own_loader(image_store: ImageStore, musl_image: Image) -> None:
    """It stands for every image whose libc is not the host's."""
    root = image_store.layer_root(musl_image.layers[0])

    done = subprocess.run(["chroot", root, "/hello", "a"], check=True, capture_output=True)
    assert done.stdout == b"a\n"


def test_busybox_image_runs_applets(image_store: ImageStore, busybox_image: Image) -> None:
    """Its links must lead to the program inside the image."""
    root = image_store.layer_root(busybox_image.layers[0])

    done = subprocess.run(
        ["chroot", root, "/bin/sh", "-c", "id -un"], check=True, capture_output=True
    )
    assert done.stdout == b"root\n"


def test_debian_image_holds_nothing_of_this_machine(
    image_store: ImageStore, debian_image: Image
) -> None:
    """mmdebstrap copies the host's name and resolver in, and apt options that may hold
    passwords; agents would read them."""
    etc = image_store.layer_root(debian_image.layers[0]) / "etc"

    assert (etc / "hostname").read_text() == "sandbox\n"
    assert (etc / "resolv.conf").read_text() == ""
    assert "127.0.0.1\tlocalhost" in (etc / "hosts").read_text()
    assert "::1\tlocalhost" in (etc / "hosts").read_text()
    assert not (etc / "apt/apt.conf.d/99mmdebstrap").exists()
    assert all("@" not in path.read_text() for path in (etc / "apt").rglob("*.list"))


def test_debian_image_has_what_agents_need(image_store: ImageStore, debian_image: Image) -> None:
    """Tasks count on git, python3 and ps being there. (Not run here: that would write to it.)"""
    binaries = image_store.layer_root(debian_image.layers[0]) / "usr/bin"

    assert {"git", "python3", "ps", "bash"} <= {path.name for path in binaries.iterdir()}


def test_layers_of_the_store_still_have_their_digest(
    image_store: ImageStore, debian_image: Image
) -> None:
    """A sandbox, or a careless test, that wrote to a lower layer would change every later one."""
    for digest in debian_image.layers:
        assert digest_tree(image_store.layer_root(digest)).digest == digest
