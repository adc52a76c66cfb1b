"""What a service hands to the program that takes its place in the same process: its descriptors.

An upgrade executes the program anew, as it is installed by then. Sockets that listen and locks that
are held stay open meanwhile: clients that connect wait for a moment, and nobody else gets in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from coldframe.protocol.errors import CapabilityError

_VARIABLE = "COLDFRAME_HANDOVER"
_CHECK = (
    "import coldframe.cli.serve, coldframe.gateway.server, coldframe.node.node; "
    "from coldframe.host.wire import VERSION; print(VERSION)"
)
_CHECK_S = 60.0


@dataclass(frozen=True)
class Handover:
    """Descriptors by what they are. What is not known to a later version is closed by it."""

    listeners: Mapping[str, int] = field(default_factory=dict)
    """By address: `unix:PATH`, or as `Listen` is written."""
    locks: Mapping[str, int] = field(default_factory=dict)
    """Of unix sockets, by path."""
    daemon: int | None = None
    """The lock of the node."""

    @classmethod
    def taken(cls) -> Handover:
        """Return what the program before has handed over, once."""
        text = os.environ.pop(_VARIABLE, "")
        if not text:
            return cls()
        told = json.loads(text)
        for fd in (*told["listeners"].values(), *told["locks"].values(), told["daemon"]):
            if fd is not None:
                os.set_inheritable(fd, False)
        return cls(told["listeners"], told["locks"], told["daemon"])


def require_program(spawner_protocol: int | None) -> None:
    """See whether the program, as it is installed now, can go on with what is here.

    Args:
        spawner_protocol: what keeps the sandboxes speaks it; None: nothing does.
    Raises:
        CapabilityError: it cannot be started, or speaks another; the message says so.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _CHECK],
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapabilityError(f"the installed coldframe cannot be started: {error}") from error
    if tried.returncode != 0:
        last = (tried.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CapabilityError(f"the installed coldframe cannot be started: {last}")
    speaks = tried.stdout.strip()
    if spawner_protocol is not None and speaks != str(spawner_protocol):
        raise CapabilityError(
            f"what keeps the sandboxes speaks protocol {spawner_protocol}, the coldframe that is "
            f"installed now speaks {speaks}: when they have ended, coldframe node stop, and the "
            "next node is a new one"
        )


def execute_again(handover: Handover) -> None:
    """Execute this program anew with the same arguments. Returns only by raising OSError."""
    told = asdict(handover)
    for fd in (*told["listeners"].values(), *told["locks"].values(), told["daemon"]):
        if fd is not None:
            os.set_inheritable(fd, True)
    os.environ[_VARIABLE] = json.dumps(told)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
