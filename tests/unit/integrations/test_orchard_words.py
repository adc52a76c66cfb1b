"""Orchard's words: quantities of Kubernetes, and what a command is run as."""

from __future__ import annotations

import pytest

from coldframe.integrations.orchard.jobs import argvs
from coldframe.integrations.orchard.words import Create, memory_of, quantity, spec_of
from coldframe.protocol.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("4", 4), ("0.5", 0.5), ("2000m", 2), ("100m", 0.1), ("1048576", 1 << 20)),
        *(("16Gi", 16 << 30), ("512Mi", 512 << 20), ("1024Ki", 1 << 20), ("2G", 2 * 10**9)),
    ],
)
def test_quantity_is_what_kubernetes_means(text: str, value: float) -> None:
    """A factor of 1,000 in a limit would show late."""
    assert quantity(text, "memory") == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "four", "-1", "0", "1 GiB", "1e3", "Gi", "٤", "1" * 400, "9" * 300 + "Ti"]
)
def test_quantity_that_is_none_is_refused(text: str) -> None:
    """By the name of the field."""
    with pytest.raises(InvalidRequestError, match="cpu"):
        quantity(text, "cpu")


def test_memory_is_written_as_it_was_asked_for() -> None:
    """Clients compare what they asked for with what they got."""
    for text in ("16Gi", "512Mi", "3Ti", "1536Mi", "1000"):
        assert memory_of(quantity(text, "memory")) == text


def test_open_network_is_the_world_and_nothing_local() -> None:
    """Orchard's own opens the metadata service and the neighbours."""
    assert spec_of(Create(image="x"), "a").network.empty
    opened = spec_of(Create(image="x", block_network=False), "a").network
    assert (opened.public, opened.rules) == (True, ())


def test_command_is_a_shells_line_or_an_argv() -> None:
    """Text for bash, else sh; a list never joined, and quoted where a shell must have it."""
    assert argvs("a b", login=False) == [("bash", "-c", "a b"), ("sh", "-c", "a b")]
    assert argvs(["a", "b c"], login=False) == [("a", "b c")]
    assert argvs(["a", "b c"], login=True)[0][-1].endswith("\na 'b c'")
    for empty in ("", []):
        with pytest.raises(InvalidRequestError):
            argvs(empty, login=False)
