"""Other names of images: public Dockerfiles build on what the store has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from coldframe.images.base import ImageConfig
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import ImageError, ImageNotFoundError, InvalidRequestError

PINNED = "python@sha256:" + "0" * 64


@pytest.fixture
def mine(store: ImageStore, add: Callable[..., str]) -> str:
    """An image, and its digest."""
    return store.tag("mine:1", [add(a="1")], ImageConfig()).digest


def test_alias_resolves_to_the_image_under_its_own_name(store: ImageStore, mine: str) -> None:
    """What ran is recorded as what it is."""
    store.aliases.add("python:3.11-slim", "mine:1")

    for prefix in ("", "docker.io/library/", "library/"):
        image = store.resolve(f"{prefix}python:3.11-slim")
        assert (image.name, image.digest) == ("mine:1", mine)
    with pytest.raises(ImageNotFoundError):
        store.inspect("python:3.11-slim")


def test_alias_of_a_digest_and_of_a_pinned_name(store: ImageStore, mine: str) -> None:
    """A registry's digest is none of ours: only an alias can say that one stands for it."""
    with pytest.raises(ImageNotFoundError, match=f"image alias python:latest@sha256:{'0' * 64} "):
        store.resolve(PINNED)
    store.aliases.add(PINNED, mine)

    assert store.resolve(PINNED).digest == mine
    assert store.resolve(f"anything@sha256:{mine}").digest == mine


def test_image_of_the_name_comes_before_an_alias(
    store: ImageStore, mine: str, add: Callable[..., str]
) -> None:
    """The image itself is truer than what stands for it."""
    store.aliases.add("real", "mine:1")
    real = store.tag("real", [add(b="2")], ImageConfig())

    assert store.resolve("real").digest == real.digest != mine


def test_alias_whose_target_is_missing_names_both(store: ImageStore) -> None:
    """Built in or added: one sentence that says what to make."""
    store.aliases.add("a", "b")

    with pytest.raises(ImageNotFoundError, match=r"'a:latest' is an alias of 'b:latest': no image"):
        store.resolve("a")
    with pytest.raises(
        ImageNotFoundError,
        match=r"'debian:12-slim' is an alias of 'debian:bookworm'.*bootstrap debian:bookworm;",
    ):
        store.resolve("debian:12-slim")


def test_alias_of_an_alias_is_followed_and_a_circle_is_told(store: ImageStore, mine: str) -> None:
    """`alias base debian:12` leads on to what is built in."""
    store.aliases.add("a", "b")
    store.aliases.add("b", "c")
    with pytest.raises(ImageNotFoundError, match=r"'a:latest' is an alias of 'c:latest': no image"):
        store.resolve("a")
    store.aliases.add("c", "mine:1")
    assert store.resolve("a").digest == mine

    store.aliases.add("c", "a")
    with pytest.raises(ImageError, match="leads to itself"):
        store.resolve("a")


def test_missing_image_says_how_to_bootstrap_import_or_alias(store: ImageStore) -> None:
    """One clear error for the commonest failure of a public Dockerfile."""
    with pytest.raises(ImageNotFoundError) as caught:
        store.resolve("python:3.11-slim")
    for remedy in ("image import python:3.11-slim", "image alias python:3.11-slim TARGET"):
        assert remedy in str(caught.value)


def test_table_changes_and_forgets(store: ImageStore, mine: str) -> None:
    """What was removed is unknown again."""
    assert store.aliases.add("a", "mine:1") == ("a:latest", "mine:1")
    store.aliases.add("a", mine)
    assert store.aliases.table() == {"a:latest": mine}
    assert store.aliases.remove("a") == "a:latest"
    with pytest.raises(ImageNotFoundError, match="'a:latest' is no alias"):
        store.aliases.remove("a")
    with pytest.raises(ImageError, match="cannot stand for itself"):
        store.aliases.add("a", "a:latest")
    with pytest.raises(InvalidRequestError):
        store.aliases.add("Bad Name", "mine:1")
    with pytest.raises(InvalidRequestError, match="the digest after @"):
        store.resolve("a@sha256:1")


def test_two_processes_add_at_once_and_both_stay(store: ImageStore) -> None:
    """The table is one file: a lost line would be a build that fails later."""
    script = (
        "import sys; from pathlib import Path; from coldframe.images.store import ImageStore\n"
        "with ImageStore(Path(sys.argv[1])) as store:\n"
        "    for number in range(20): store.aliases.add(f'{sys.argv[2]}:{number}', 'mine:1')"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script, str(store.root), who]) for who in "ab"
    ]

    assert [process.wait() for process in running] == [0, 0]
    assert len(store.aliases.table()) == 40
