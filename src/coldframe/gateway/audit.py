"""Who did what: a line of JSON for every change that somebody made or tried, and every refusal.

A line names the route by its template, never what was sent: no body, no secret, no path of a
caller's choice. What a caller can choose (the name of a sandbox, its trace id) is cut and escaped,
so that no line can be forged. Files are rotated by size; a flood of refusals by one caller is
counted rather than written, so that it hides nothing of others.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from coldframe.gateway.settings import GatewaySettings
from coldframe.protocol.errors import CapabilityError

log = logging.getLogger("coldframe.gateway")

DIRECTORY = "audit"
"""In a home."""
FILE = "audit.jsonl"
_COMPLAIN_S = 60.0


class AuditLog:
    """Files in a directory, for root and the service's own user. Several processes may share it."""

    def __init__(self, directory: Path, file_bytes: int, files: int) -> None:
        """Open the newest file: `audit.jsonl`; older ones are `audit.jsonl.1` and so on."""
        self._path, self._file_bytes, self._files = directory / FILE, file_bytes, files
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._open()
        self._unwritten = 0
        self._complained_at = float("-inf")

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line. A full disk stops nobody's work: what it takes is counted and said."""
        if self._unwritten:
            entry = {**entry, "unwritten": self._unwritten}
        line = _encoded(entry) + b"\n"
        try:
            if os.fstat(self._fd).st_size + len(line) > self._file_bytes:
                self._rotate()
            os.write(self._fd, line)
            self._unwritten = 0
        except OSError as error:
            self._unwritten += 1
            if time.monotonic() - self._complained_at > _COMPLAIN_S:
                self._complained_at = time.monotonic()
                log.error("%s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Close the file. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._path, flags, 0o600)

    def _rotate(self) -> None:
        held = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            if self._is_newest():  # else another process has done it
                for age in range(self._files - 1, 0, -1):
                    newer = self._path if age == 1 else self._aged(age - 1)
                    if newer.exists():
                        newer.replace(self._aged(age))
            fd = self._open()
        finally:
            os.close(held)
        os.close(self._fd)
        self._fd = fd

    def _aged(self, age: int) -> Path:
        return self._path.with_name(f"{FILE}.{age}")

    def _is_newest(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False


def _encoded(entry: dict[str, Any]) -> bytes:
    """As JSON in ASCII, so that no character of a caller's ends a line for whoever reads it."""
    try:
        text = to_json(entry)
        if text.isascii():
            return text
    except ValueError:  # lone surrogates
        pass
    return json.dumps(entry, separators=(",", ":")).encode("ascii")


def open_log(settings: GatewaySettings) -> AuditLog | None:
    """Open the log that the settings name; None: they name none.

    Raises:
        CapabilityError: it cannot be written.
    """
    if settings.audit is None:
        return None
    try:
        return AuditLog(settings.audit, settings.audit_bytes, settings.audit_files)
    except OSError as error:
        raise CapabilityError(
            f"no audit log can be written in {settings.audit}: {error}; run as the owner of "
            "COLDFRAME_HOME"
        ) from error


def entry(
    *,
    method: str,
    route: str,
    peer: str,
    status: int | None = None,
    key: str | None = None,
    owner: str | None = None,
    sandbox: str | None = None,
    trace: str | None = None,
) -> dict[str, Any]:
    """Return a line. `sandbox`, `trace` and `method` may be a caller's own words, cut already."""
    return {
        "time": round(time.time(), 3),
        "trace": trace,
        "key": key,
        "owner": owner,
        "method": method,
        "route": route,
        "sandbox": sandbox,
        "status": status,
        "peer": peer,
    }


def of_command(command: str, key_id: str | None, owner: str | None) -> dict[str, Any]:
    """Return the line of what was done to keys on the command line of this machine."""
    peer = f"uid {os.getuid()}"
    return entry(method="COMMAND", route=command, key=key_id, owner=owner, peer=peer)
