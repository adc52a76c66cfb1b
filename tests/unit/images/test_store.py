"""The store: shared by processes, and whole after any of them is killed."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from coldframe.images.base import ImageConfig
from coldframe.images.digest import digest_tree
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import (
    CapabilityError,
    ImageError,
    ImageNotFoundError,
    InvalidRequestError,
)

Add = Callable[..., str]
CONFIG = ImageConfig(env=(("A", "1"),), workdir="/w", user="1:2", labels=(("k", "v"),))


def _python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_resolve_gives_back_what_was_tagged(store: ImageStore, add: Add) -> None:
    """By name, by name without tag, and by digest, also from another process's store."""
    lower, upper = add(a="1"), add(b="2")
    made = store.tag("tool", [upper, lower], CONFIG)

    with ImageStore(store.root) as again:
        for name in ("tool", "tool:latest", made.digest, f"sha256:{made.digest}"):
            assert again.resolve(name) == made
    assert (made.layers, made.config) == ((upper, lower), CONFIG)
    assert (store.layer_root(upper) / "b").read_text() == "2"


def test_resolve_sees_what_another_store_has_tagged_or_removed(store: ImageStore, add: Add) -> None:
    """Records are kept in memory; a build in another process must not be run against."""
    first = store.tag("mine", [add(a="1")], ImageConfig())
    assert store.resolve("mine") == first
    with ImageStore(store.root) as other:
        second = other.tag("mine", first.layers, ImageConfig(workdir="/elsewhere"))
        assert store.resolve("mine") == second != first
        other.remove("mine")
    with pytest.raises(ImageNotFoundError):
        store.resolve("mine")


def test_resolve_of_unknown_name_says_how_to_get_it(store: ImageStore) -> None:
    """The first command of a new user fails here; the message must carry them on."""
    with pytest.raises(ImageNotFoundError, match="coldframe image bootstrap debian:bookworm"):
        store.resolve("debian:bookworm")
    with pytest.raises(ImageNotFoundError, match="coldframe image bootstrap debian:SUITE"):
        store.resolve("debian")
    with pytest.raises(ImageNotFoundError, match="coldframe image import own:1"):
        store.resolve("own:1")
    with pytest.raises(ImageNotFoundError, match="0" * 64):
        store.resolve("0" * 64)
    with pytest.raises(InvalidRequestError):
        store.resolve("../refs")


def test_resolve_of_misspelt_name_tells_the_nearest(store: ImageStore, add: Add) -> None:
    """Whoever mistypes a name does not want to make another image."""
    store.tag("debian:bookworm", [add(a="1")], ImageConfig())

    for name in ("debian:bookwrm", "debian"):
        with pytest.raises(ImageNotFoundError, match=r"did you mean 'debian:bookworm'\? Else"):
            store.resolve(name)
    with pytest.raises(ImageNotFoundError) as refusal:
        store.resolve("own:1")
    assert "did you mean" not in str(refusal.value)


def test_add_layer_of_same_tree_is_kept_once(store: ImageStore, add: Add) -> None:
    """A hundred images on one base must not cost a hundred bases."""
    assert add(a="1") == add(a="1")
    assert len(list(store.layers_directory.iterdir())) == 1
    assert list((store.root / "tmp").iterdir()) == []


def test_add_layer_of_bad_tree_leaves_nothing(store: ImageStore) -> None:
    """A refused tree may be large."""
    with pytest.raises(ImageError, match="65536"), store.workspace() as work:
        (work / "tree").mkdir()
        os.chown(work / "tree", 65536, 0)
        store.add_layer(work / "tree")

    assert list(store.layers_directory.iterdir()) == []
    assert list((store.root / "tmp").iterdir()) == []


def test_tag_of_missing_layer_is_refused(store: ImageStore, add: Add) -> None:
    """An image that cannot be mounted must not have a name."""
    with pytest.raises(ImageError, match="f" * 64):
        store.tag("x", [add(a="1"), "f" * 64], CONFIG)
    assert store.list() == ()


def test_remove_keeps_layers_that_others_need(store: ImageStore, add: Add) -> None:
    """Removing one image must not break its siblings."""
    base, top = add(a="1"), add(b="2")
    store.tag("base", [base], CONFIG)
    store.tag("derived", [top, base], CONFIG)
    store.close()

    removal = store.remove("derived")

    assert (removal.names, removal.layers, removal.in_use) == (("derived:latest",), (top,), ())
    assert store.resolve("base").layers == (base,)
    with pytest.raises(ImageNotFoundError):
        store.resolve("derived")


def test_remove_of_image_in_use_keeps_its_layers_until_gc(store: ImageStore, add: Add) -> None:
    """Files that vanish under a running sandbox are a failure that is booked as the agent's."""
    layer = add(a="1")
    store.tag("x", [layer], CONFIG)
    store.close()
    with ImageStore(store.root) as node:
        node.resolve("x")

        assert store.remove("x").in_use == (layer,)
        assert store.gc().in_use == (layer,)
        assert (store.layer_root(layer) / "a").read_text() == "1"

    assert store.gc().layers == (layer,)
    assert list(store.layers_directory.iterdir()) == []


def test_remove_by_digest_drops_every_name(store: ImageStore, add: Add) -> None:
    """A digest means the image, not one of its names."""
    layer = add(a="1")
    image = store.tag("x", [layer], CONFIG)
    store.tag("y", [layer], CONFIG)
    store.close()

    assert store.remove(image.digest).names == ("x:latest", "y:latest")
    assert store.list() == ()


def test_layers_of_a_dropped_store_are_free(store: ImageStore, add: Add) -> None:
    """A program that opens and drops clients must neither leak descriptors nor fill the disk."""
    layer = add(a="1")
    store.tag("x", [layer], CONFIG)
    store.close()
    ImageStore(store.root).resolve("x")
    gc.collect()

    assert store.remove("x").layers == (layer,)


def test_layers_held_by_killed_process_are_free(store: ImageStore, add: Add) -> None:
    """A lock that outlives its holder would keep the disk full for ever."""
    layer = add(a="1")
    store.tag("x", [layer], CONFIG)
    store.close()
    holder = _python(
        """
        import sys, time; from pathlib import Path; from coldframe.images.store import ImageStore
        store = ImageStore(Path(sys.argv[1])); store.resolve("x"); print("held", flush=True)
        time.sleep(600)
        """,
        store.root,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert store.remove("x").in_use == (layer,)

    holder.kill()
    holder.wait()

    assert store.gc().layers == (layer,)


def test_gc_removes_what_a_killed_process_left_half_made(store: ImageStore) -> None:
    """kill -9 in the middle of an import: no image, and gc frees the disk."""
    writer = _python(
        """
        import sys, time; from pathlib import Path; from coldframe.images.store import ImageStore
        store = ImageStore(Path(sys.argv[1]))
        with store.workspace() as work:
            (work / "tree").mkdir(); (work / "tree" / "big").write_bytes(b"x" * 100000)
            print(work, flush=True)
            time.sleep(600)
        """,
        store.root,
    )
    assert writer.stdout is not None
    work = Path(writer.stdout.readline().strip())

    store.gc()
    assert (work / "tree" / "big").exists(), "a live process lost its work"
    writer.kill()
    writer.wait()
    store.gc()

    assert not work.exists()
    assert list((store.root / "tmp").iterdir()) == []


async def test_gc_removes_the_lock_of_a_killed_builder_only(store: ImageStore) -> None:
    """One that is held must stay: else two builders would do the same step."""
    left = store.root / "cache" / "left.lock"
    left.touch()

    async with store.step("held", lambda: None):
        store.gc()
        assert [path.name for path in (store.root / "cache").iterdir()] == ["held.lock"]

    assert not left.exists()


def test_gc_keeps_layer_that_is_not_tagged_yet(store: ImageStore, add: Add) -> None:
    """Between add_layer and tag another process's gc must not take the layer away."""
    layer = add(a="1")
    with ImageStore(store.root) as other:
        other.gc()

    assert store.tag("x", [layer], CONFIG).layers == (layer,)


def test_store_shared_by_many_processes_loses_nothing(store: ImageStore) -> None:
    """Imports, removals and collections meet in production; every survivor must be whole."""
    workers = [
        _python(
            """
            import sys; from pathlib import Path; from coldframe.images.store import ImageStore
            from coldframe.images.base import ImageConfig
            store, me = ImageStore(Path(sys.argv[1])), int(sys.argv[2])
            for turn in range(12):
                with store.workspace() as work:
                    (work / "t").mkdir(); (work / "t" / "f").write_text(str(turn))
                    layer = store.add_layer(work / "t")
                store.tag(f"w{me}:{turn}", [layer], ImageConfig())
                store.close()
                if turn % 3 == me % 3: store.remove(f"w{me}:{turn}")
                if turn % 4 == 0: store.gc()
            """,
            store.root,
            me,
        )
        for me in range(4)
    ]
    assert [worker.wait() for worker in workers] == [0] * 4

    records = store.list()
    assert len(records) == 4 * 8
    for record in records:
        for layer in store.resolve(record.name).layers:
            assert digest_tree(store.layer_root(layer)).digest == layer


@pytest.mark.parametrize("stage", ["workspace", "layer", "tag"])
def test_store_after_kill_at_any_stage_is_whole(store: ImageStore, stage: str) -> None:
    """An image is there whole or not at all."""
    child = _python(
        """
        import os, sys, signal; from pathlib import Path
        from coldframe.images.store import ImageStore; from coldframe.images.base import ImageConfig
        store, stage = ImageStore(Path(sys.argv[1])), sys.argv[2]
        die = lambda: os.kill(os.getpid(), signal.SIGKILL)
        with store.workspace() as work:
            (work / "t").mkdir(); (work / "t" / "f").write_text("x")
            if stage == "workspace": die()
            layer = store.add_layer(work / "t")
            if stage == "layer": die()
        store.tag("x", [layer], ImageConfig())
        die()
        """,
        store.root,
        stage,
    )
    assert child.wait() == -signal.SIGKILL

    store.gc()

    assert [record.name for record in store.list()] == (["x:latest"] if stage == "tag" else [])
    assert len(list(store.layers_directory.iterdir())) == (stage == "tag")
    assert list((store.root / "tmp").iterdir()) == []


def test_recall_of_step_whose_layer_is_gone_is_a_miss(store: ImageStore, add: Add) -> None:
    """A cache that names a missing layer would break the build that trusts it."""
    layer = add(a="1")
    store.remember("0" * 64, layer)
    assert store.recall("0" * 64) == layer
    store.close()
    store.gc()

    assert store.recall("0" * 64) is None


def test_damaged_record_is_named(store: ImageStore, add: Add) -> None:
    """One sentence that says which file, instead of a traceback."""
    store.tag("x", [add(a="1")], CONFIG)
    (store.root / "refs" / "x:latest.json").write_text("{")

    with pytest.raises(ImageError, match=r"x:latest\.json is damaged"):
        store.resolve("x")


def test_full_disk_is_typed_and_loses_nothing(tmp_path: Path) -> None:
    """A full disk must not cost the images that are there."""
    code = """
        import os, subprocess, sys; from pathlib import Path
        from coldframe.images.store import ImageStore; from coldframe.images.base import ImageConfig
        from coldframe.protocol.errors import StorageFullError
        root = Path(sys.argv[1]); root.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", root], check=True)
        store = ImageStore(root / "images")
        def add(name, size):
            with store.workspace() as work:
                (work / "t").mkdir(); (work / "t" / "f").write_bytes(b"x" * size)
                store.tag(name, [store.add_layer(work / "t")], ImageConfig())
        add("small", 1000)
        try:
            add("big", 2 << 20)
        except StorageFullError as error:
            print("full:", error)
        left = list((root / "images/tmp").iterdir())
        print([r.name for r in store.list()], left, store.resolve("small").name)
    """
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "disk")],
        check=True,
        capture_output=True,
        text=True,
    )

    first, second = done.stdout.splitlines()
    assert first.startswith("full: no space is left for images")
    assert second == "['small:latest'] [] small:latest"


def test_work_that_another_user_may_not_do_names_root(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Operation not permitted` alone says nothing of owners."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(CapabilityError, match="run it as root"), store.workspace() as work:
        assert work.is_dir()
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_store_is_closed_to_other_users(store: ImageStore) -> None:
    """Layers hold set-user-id programs of strangers; a user of the host must not run one."""
    assert store.root.stat().st_mode & 0o077 == 0


def test_store_that_cannot_be_made_is_named_with_the_setting(tmp_path: Path) -> None:
    """A read-only or mistaken home: the kernel's words alone say nothing of what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(CapabilityError, match="file/images: Not a directory; set COLDFRAME_HOME"):
        ImageStore(tmp_path / "file" / "images")


def test_layer_is_a_digest_and_never_a_path(store: ImageStore, add: Add) -> None:
    """It comes from records and requests; `..` must not be mounted as a layer."""
    layer = add(f="x")
    outside = store.layers_directory.parent / "outside"
    outside.mkdir()
    (outside / "lock").touch()
    (outside / "layer.json").write_text('{"size_bytes": 1}')
    for name in ("../outside", f"{layer}/../../outside", "", layer.upper()):
        with pytest.raises(ImageError):
            store.tag("odd", [name], ImageConfig())
