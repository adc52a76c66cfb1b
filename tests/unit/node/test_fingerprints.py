"""Equal states give equal fingerprints, every change gives another."""

from __future__ import annotations

import pytest

from coldframe.node import fingerprints
from coldframe.node.node import Node
from coldframe.protocol.errors import FileTooLargeError
from coldframe.protocol.models import ExecRequest, SandboxSpec
from tests.unit.node.conftest import SPEC

BASE = "mkdir d; echo content > d/f; ln -s f d/l; chmod 640 d/f; mkfifo p"


async def prepared(node: Node, command: str = BASE, spec: SandboxSpec = SPEC) -> str:
    """A sandbox in which a command has run."""
    sandbox = await node.create_sandbox(spec)
    result = await node.exec(sandbox.id, ExecRequest(command=command))
    assert result.ok, result.stderr
    return sandbox.id


async def test_fingerprint_of_equal_states_is_equal(node: Node) -> None:
    """Two sandboxes, other ids, names, times and order of the same work."""
    one = await prepared(node)
    named = SPEC.model_copy(update={"name": "other", "labels": {"a": "b"}, "ttl_s": None})
    other = await prepared(
        node, "mkfifo p; mkdir d; cd d; ln -s f l; echo x > f; echo content > f; chmod 640 f", named
    )

    assert await node.fingerprint(one) == await node.fingerprint(other)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("echo contenT > d/f", "files"),
        ("echo >> d/f", "files"),
        ("chmod 600 d/f", "files"),
        ("rm d/f", "files"),
        ("mv d/f d/g", "files"),
        ("ln -sfn g d/l", "files"),
        ("rm p; mkdir p", "files"),
        ("touch \"$(printf 'a\\nb')\"", "files"),
        ("mkdir d/empty", "files"),
        ("chmod 700 d", "files"),
        ("sleep 60 >/dev/null 2>&1 &", "processes"),
        ("echo 'new:x:7:7::/:/bin/sh' >> etc/passwd", "users"),
    ],
)
async def test_fingerprint_after_change_differs_there(node: Node, change: str, part: str) -> None:
    """A change that goes unseen would pass for the initial state."""
    sandbox = await prepared(node)
    before = await node.fingerprint(sandbox)

    assert (await node.exec(sandbox, ExecRequest(command=change))).exit_code == 0
    after = await node.fingerprint(sandbox)

    assert getattr(after, part) != getattr(before, part)
    assert after.digest != before.digest


async def test_fingerprint_after_change_and_back_is_the_same(node: Node) -> None:
    """State, not history."""
    sandbox = await prepared(node)
    before = await node.fingerprint(sandbox)

    await node.exec(
        sandbox, ExecRequest(command="mv d/f x; echo a > y; rm y; cp x d/f; rm x; chmod 640 d/f")
    )

    assert await node.fingerprint(sandbox) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("cpu", 1.0), ("memory_bytes", 1 << 30), ("pids", 99), ("env", {"A": "1"})],
)
async def test_fingerprint_of_other_limits_differs(node: Node, field: str, value: object) -> None:
    """A task that passes with 4 GiB may fail with one."""
    one = await node.fingerprint(await prepared(node))
    other = await node.fingerprint(
        await prepared(node, spec=SPEC.model_copy(update={field: value}))
    )

    assert one.files == other.files
    assert one.limits != other.limits


async def test_fingerprint_of_other_image_differs(node: Node) -> None:
    """Even when nothing was written over it."""
    one = await node.create_sandbox(SPEC)
    other = await node.create_sandbox(SandboxSpec(image="other"))

    assert (await node.fingerprint(one.id)).files != (await node.fingerprint(other.id)).files


async def test_fingerprint_of_absurd_size_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of exabytes costs nothing to make, and would be read for years."""
    monkeypatch.setattr(fingerprints, "MOST_BYTES", 1 << 20)
    sandbox = await prepared(node, "truncate -s 2M big")

    with pytest.raises(FileTooLargeError, match="big"):
        await node.fingerprint(sandbox)


async def test_fingerprint_declares_what_it_leaves_out(node: Node) -> None:
    """The reader must know what equality does not say."""
    sandbox = await prepared(node)

    assert "times of files" in (await node.fingerprint(sandbox)).excluded
