"""Events as lines."""

from __future__ import annotations

import pytest

from coldframe.cli import events
from coldframe.protocol.models import EventKind, SandboxEvent, SandboxState, StorageEvent


@pytest.mark.parametrize(
    ("storage", "line"),
    [
        (StorageEvent(at=1, writable=False, reason="make room"), "cannot write  make room"),
        (StorageEvent(at=2, writable=True), "can write again"),
    ],
)
def test_event_of_storage_says_whether_the_sandbox_can_write(
    storage: StorageEvent, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would read as a transition to the state that the sandbox has anyway."""
    event = SandboxEvent(
        cursor="ev-1",
        at=storage.at,
        sandbox_id="sb-a",
        kind=EventKind.STORAGE,
        state=SandboxState.READY,
        version=3,
        storage=storage,
    )
    events._print(event, as_json=False)
    assert f"sb-a  {line}  ev-1" in capsys.readouterr().out
