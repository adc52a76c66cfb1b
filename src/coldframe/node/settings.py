"""What a node is told once. The only place in this room that reads the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.places import DEFAULT_HOME


@dataclass(frozen=True)
class NodeSettings:
    """Every default is the one that is used; sizes are bytes, durations seconds."""

    home: Path = DEFAULT_HOME
    """COLDFRAME_HOME: images, and the state of every node of this machine."""
    runtime: str = "native"
    """COLDFRAME_RUNTIME: `native`, `fake`, or an entry point of `coldframe.runtimes`."""
    storage: str = "auto"
    """COLDFRAME_STORAGE: where uppers live; the native runtime knows the names."""
    workers: int = 2
    """COLDFRAME_WORKERS: spawner processes."""
    max_sandboxes: int = 4096
    """COLDFRAME_MAX_SANDBOXES: alive at once; more is refused."""
    create_slots: int = 16
    """COLDFRAME_CREATE_SLOTS: creates and destroys in progress at once; more wait their turn."""
    exec_slots: int = 3 * len(os.sched_getaffinity(0))
    """COLDFRAME_EXEC_SLOTS: commands in their first moments at once; more wait their turn.

    As many as keep the processors busy: what more would share them all end later, and who came
    first may end last.
    """
    exec_hold_s: float = 0.02
    """COLDFRAME_EXEC_HOLD_S: a command gives its slot back when it ends or after this long.

    Sooner, down to a quarter, where those that end sooner take less than half of it. So short
    commands never pile up, and long ones never keep others from starting.
    """
    max_running_execs: int = 8192
    """COLDFRAME_MAX_RUNNING_EXECS: running at once; more is refused.

    An owner may run three times as many as may be begun beside, of 8,192 at most 6,144.
    """
    queue_limit: int = 16384
    """COLDFRAME_QUEUE_LIMIT: waiting per queue (creates, execs); more is refused."""
    result_ttl_s: float = 3600.0
    """COLDFRAME_RESULT_TTL_S: how long a result can be had again by its operation id."""
    result_count: int = 8_192
    """COLDFRAME_RESULT_COUNT: results kept; the oldest of who has most go first."""
    result_bytes: int = 256 << 20
    """COLDFRAME_RESULT_BYTES: output windows kept in results; likewise."""
    spool_count: int = 256
    """COLDFRAME_SPOOL_COUNT: ended commands whose whole output can still be read; likewise."""
    spool_bytes: int = 2 << 30
    """COLDFRAME_SPOOL_BYTES: what these keep beyond results; likewise."""
    sandbox_spool_bytes: int = 4 << 30
    """COLDFRAME_SANDBOX_SPOOL_BYTES: what all commands of one sandbox may keep beyond results.

    Those that run count for their whole spools, which become smaller as the rest does.
    """
    expired_ids: int = 262_144
    """COLDFRAME_EXPIRED_IDS: operation ids whose result is gone that are still refused.

    Where there are more, who has most of them loses the oldest, which would run again.
    """
    quarantine_s: float = 300.0
    """COLDFRAME_QUARANTINE_S: how long a sandbox can still be read after its lease ended; 0: not.

    Its commands are killed when the lease ends, and no more are taken.
    """
    ended_count: int = 20_000
    """COLDFRAME_ENDED_COUNT: sandboxes that ended whose record can still be had; likewise."""
    ended_bytes: int = 256 << 20
    """COLDFRAME_ENDED_BYTES: what was asked for in these; likewise."""

    event_count: int = 16_384
    """COLDFRAME_EVENT_COUNT: transitions of sandboxes that can still be read, the newest."""
    owner_window_bytes: int = 1 << 30
    """COLDFRAME_OWNER_WINDOW_BYTES: windows above 1 MiB and requests above 64 KiB of one
    owner's running commands; as much again for environments above 64 KiB of its live sandboxes.

    Both streams of each count; more is refused.
    """
    grace_s: float = 86_400.0
    """COLDFRAME_GRACE_S: how long what a service has left waits for the next one before it ends."""
    return_s: float = 30.0
    """COLDFRAME_RETURN_S: how long clients have to come back after another process took over.

    What those made that do not, and whose process has ended, ends then.
    """

    def __post_init__(self) -> None:
        # A program that changes its directory later must not lose its images and its state.
        object.__setattr__(self, "home", self.home.absolute())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> NodeSettings:
        """Read COLDFRAME_* variables.

        Raises:
            InvalidRequestError: a value is not of its kind or out of range; it is named.
        """
        source = os.environ if environment is None else environment
        default = cls()
        return cls(
            home=Path(source.get("COLDFRAME_HOME") or default.home),
            runtime=source.get("COLDFRAME_RUNTIME") or default.runtime,
            storage=source.get("COLDFRAME_STORAGE") or default.storage,
            workers=_integer(source, "WORKERS", default.workers),
            max_sandboxes=_integer(source, "MAX_SANDBOXES", default.max_sandboxes),
            create_slots=_integer(source, "CREATE_SLOTS", default.create_slots),
            exec_slots=_integer(source, "EXEC_SLOTS", default.exec_slots),
            exec_hold_s=_seconds(source, "EXEC_HOLD_S", default.exec_hold_s),
            max_running_execs=_integer(source, "MAX_RUNNING_EXECS", default.max_running_execs),
            queue_limit=_integer(source, "QUEUE_LIMIT", default.queue_limit),
            result_ttl_s=_seconds(source, "RESULT_TTL_S", default.result_ttl_s),
            result_count=_integer(source, "RESULT_COUNT", default.result_count),
            result_bytes=_integer(source, "RESULT_BYTES", default.result_bytes),
            owner_window_bytes=_integer(source, "OWNER_WINDOW_BYTES", default.owner_window_bytes),
            spool_count=_integer(source, "SPOOL_COUNT", default.spool_count),
            spool_bytes=_integer(source, "SPOOL_BYTES", default.spool_bytes),
            sandbox_spool_bytes=_integer(
                source, "SANDBOX_SPOOL_BYTES", default.sandbox_spool_bytes
            ),
            expired_ids=_integer(source, "EXPIRED_IDS", default.expired_ids),
            quarantine_s=_seconds(source, "QUARANTINE_S", default.quarantine_s, least=0.0),
            return_s=_seconds(source, "RETURN_S", default.return_s),
            grace_s=_seconds(source, "GRACE_S", default.grace_s),
            ended_count=_integer(source, "ENDED_COUNT", default.ended_count),
            ended_bytes=_integer(source, "ENDED_BYTES", default.ended_bytes),
            event_count=_integer(source, "EVENT_COUNT", default.event_count),
        )


def _integer(source: Mapping[str, str], name: str, default: int) -> int:
    text = source.get(f"COLDFRAME_{name}")
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise InvalidRequestError(f"COLDFRAME_{name}={text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(
    source: Mapping[str, str], name: str, default: float, least: float | None = None
) -> float:
    text = source.get(f"COLDFRAME_{name}")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and (value > 0 if least is None else value >= least)):
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise InvalidRequestError(f"COLDFRAME_{name}={text!r} is not a number of seconds {bound}")
    return value
