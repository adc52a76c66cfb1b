"""Build steps run in sandboxes that the ledger counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.images.base import BuildStep
from coldframe.node.node import Node
from coldframe.protocol.errors import CapabilityError, WorkdirNotFoundError
from coldframe.protocol.models import Reason
from coldframe.protocol.network import NetworkPolicy
from coldframe.runtimes.fake import FakeImages


def step(command: str, target: Path, **changes: object) -> BuildStep:
    """One RUN line."""
    fields: dict[str, object] = {
        "image": FakeImages().resolve("base"),
        "argv": None,
        "command": command,
        "env": (("BUILT", "yes"),),
        "workdir": "/",
        "user": "0",
        "deadline_s": 30.0,
        "network": NetworkPolicy(),
        "target": target,
    }
    return BuildStep(**(fields | changes))  # type: ignore[arg-type]


async def test_build_step_hands_back_what_it_wrote(node: Node, tmp_path: Path) -> None:
    """In the environment of the image so far, and nothing of the sandbox stays."""
    target = tmp_path / "layer"
    target.mkdir()

    result = (await node.run_step(step('echo "$BUILT" > made', target))).result

    assert result.ok
    assert (target / "made").read_text() == "yes\n"
    ledger = await node.ledger()
    assert (ledger.created, ledger.deleted) == (1, 1)
    assert ledger.balanced


async def test_build_step_that_fails_is_a_result(node: Node, tmp_path: Path) -> None:
    """The builder says which line; nothing is exported."""
    target = tmp_path / "layer"
    target.mkdir()

    result = (await node.run_step(step("echo no >&2; exit 3", target))).result

    assert (result.reason, result.exit_code, result.stderr) == (Reason.EXIT, 3, b"no\n")
    assert list(target.iterdir()) == []
    assert (await node.ledger()).live == 0


async def test_build_step_that_is_not_executed_ends_its_sandbox(node: Node, tmp_path: Path) -> None:
    """A platform's failure is an exception, and leaves no sandbox either."""
    with pytest.raises(WorkdirNotFoundError):
        await node.run_step(step("true", tmp_path, workdir="/no/such"))

    assert (await node.ledger()).live == 0


async def test_build_without_store_is_refused(node: Node, tmp_path: Path) -> None:
    """The fake has nowhere to put a layer."""
    with pytest.raises(CapabilityError, match="no image store"):
        await node.build_image("name", tmp_path)
