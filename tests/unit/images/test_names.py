"""What may name an image."""

from __future__ import annotations

import pytest

from coldframe.images import names
from coldframe.protocol.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("debian", "debian:latest"),
        ("debian:bookworm", "debian:bookworm"),
        ("team/tool_kit:1.2-Rc3", "team/tool_kit:1.2-Rc3"),
    ],
)
def test_name_without_tag_gets_latest(given: str, full: str) -> None:
    """Users of other tools expect it."""
    assert names.normalise(given) == full


@pytest.mark.parametrize(
    "given",
    ["", "Debian", "a b", "../x", "a//b", "/a", "a:", "a:b:c", "a:-x", "-a", "a\n", "ä", "0" * 64],
)
def test_name_of_another_form_is_refused_by_name(given: str) -> None:
    """A name becomes a file name; one like `../x` must not reach the file system."""
    with pytest.raises(InvalidRequestError) as caught:
        names.normalise(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("name", ["/".join("a" * 90), "/".join("a" * 90) + ":1", "a" * 201])
def test_name_that_no_file_can_have_is_refused(name: str) -> None:
    """Each `/` takes three characters of a file's name: it was an error of the system, unnamed."""
    with pytest.raises(InvalidRequestError, match=r"too long|not an image name"):
        names.normalise(name)
    assert names.normalise("/".join("a" * 60)) == "/".join("a" * 60) + ":latest"


def test_file_names_of_different_names_differ() -> None:
    """Two images behind one record would be a mix-up without an error."""
    given = ["a/b:1", "a.b:1", "a_b:1", "a-b:1", "ab:1"]
    assert len({names.file_name(name) for name in given}) == len(given)
    assert all("/" not in names.file_name(name) for name in given)
