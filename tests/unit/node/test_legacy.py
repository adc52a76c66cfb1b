"""Notes that a program of another time has left."""

from __future__ import annotations

import json
import time
from typing import Any, cast

from coldframe.node.legacy import read_exec
from coldframe.protocol.models import ExecRequest
from coldframe.runtimes.outliving import FoundExec


def test_command_of_an_older_program_is_gone_on_with() -> None:
    """Whoever upgrades has commands that were noted without what is noted today."""
    told = {"queued_s": 0.5, "trace_id": None, "asked": ["/work", "agent", 1 << 20]}
    request = ExecRequest(command="true", env={"HOME": "/root"})
    running = cast(Any, None)
    found = FoundExec("sb-1", "op-1", json.dumps(told).encode(), request, running, None, None)

    note = read_exec(found)

    assert (note.queued_s, note.request.cwd, note.request.env) == (0.5, "/work", {})
    assert abs(note.began_at - time.time()) < 60
