"""Which stages there are, what ARG means in each, and which ones a target needs."""

from __future__ import annotations

import pytest

from coldframe.images.arguments import platform
from coldframe.images.dockerfile import parse
from coldframe.images.stages import Stages, cut_stages
from coldframe.protocol.errors import DockerfileError, InvalidRequestError


def _stages(text: str, **given: str) -> Stages:
    return cut_stages(parse(text, "D"), given)


FOUR = """FROM a AS base
FROM base AS tools
RUN x
FROM b AS unused
FROM scratch
COPY --from=tools /a /b
RUN --mount=type=bind,from=0,target=/x y
"""


def test_target_needs_what_it_is_built_on_and_what_it_reads() -> None:
    """A stage that nothing needs must cost nothing."""
    stages = _stages(FOUR)

    assert stages.needed(None) == (0, 1, 3)
    assert stages.needed("tools") == (0, 1)
    assert stages.needed("TOOLS") == (0, 1)
    assert stages.needed("2") == (2,)
    with pytest.raises(InvalidRequestError, match="there are: base, tools, unused, 3"):
        stages.needed("none")


def test_from_takes_arguments_from_before_the_first() -> None:
    """The one place where a version is chosen."""
    text = "ARG V=1\nARG BASE=python:$V\nFROM $BASE AS a\nARG V\nFROM ${BASE}-slim\n"

    assert [one.base for one in _stages(text).stages] == ["python:1", "python:1-slim"]
    assert [one.base for one in _stages(text, V="2").stages] == ["python:2", "python:2-slim"]
    assert [one.base for one in _stages(text, BASE="x").stages] == ["x", "x-slim"]


def test_from_for_this_machines_platform_is_taken() -> None:
    """It is what every generated Dockerfile says."""
    for wanted in (platform(), "$TARGETPLATFORM", "${BUILDPLATFORM}"):
        assert _stages(f"FROM --platform={wanted} x").stages[0].base == "x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM --platform=windows/arm64 x", "D:1: FROM --platform=windows/arm64 is not supported"),
        ("FROM x AS 1a", "D:1: '1a' is no stage name"),
        ("FROM x AS a\nFROM y AS A", "D:2: a second stage 'a'"),
        ("FROM x y", "D:1: FROM x y: write FROM IMAGE"),
        ("FROM $NONE", "D:1: FROM $NONE names no image: give its variable a value"),
        ("ARG A='\nFROM x", "D:1: a quote"),
        ("ARG =1\nFROM x", "D:1: '=1': write ARG NAME"),
    ],
)
def test_from_that_cannot_be_honoured_is_refused(text: str, said: str) -> None:
    """Another base is another image."""
    with pytest.raises(DockerfileError) as caught:
        _stages(text)
    assert str(caught.value).startswith(said)
