"""The environment's variables that Coldframe reads, and those that are only nearly so."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

PREFIX = "COLDFRAME_"
KNOWN = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("HOME", "URL", "API_KEY", "STORE", "RUNTIME", "STORAGE", "WORKERS", "IDLE_EXIT_S"),
        *("MAX_SANDBOXES", "CREATE_SLOTS", "EXEC_SLOTS", "EXEC_HOLD_S", "MAX_RUNNING_EXECS"),
        *("QUEUE_LIMIT", "RESULT_TTL_S", "RESULT_COUNT", "RESULT_BYTES", "SPOOL_COUNT"),
        *("SPOOL_BYTES", "SANDBOX_SPOOL_BYTES", "EXPIRED_IDS", "QUARANTINE_S"),
        *("ENDED_COUNT", "ENDED_BYTES"),
        *("EVENT_COUNT", "GRACE_S", "RETURN_S", "OWNER_WINDOW_BYTES"),
        "HANDOVER",  # from a daemon to the one that it becomes
    )
)


def misspelt(environment: Iterable[str] | None = None) -> list[str]:
    """Return a warning for each variable of ours that nothing reads, with the nearest that is."""
    warnings = []
    for name in sorted(os.environ if environment is None else environment):
        if not name.startswith(PREFIX) or name in KNOWN:
            continue
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
        if near:
            warnings.append(f"warning: nothing reads {name}; did you mean {near[0]}?")
    return warnings
