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
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldframe.gateway.identity import Identity
from coldframe.gateway.routes import Routes
from coldframe.gateway.settings import GatewaySettings
from coldframe.protocol.errors import CapabilityError

log = logging.getLogger("coldframe.gateway")

DIRECTORY = "audit"
"""In a home."""
FILE = "audit.jsonl"
_ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
_LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-")
_LONGEST = 64
_REFUSALS_PER_S = 10.0
_REFUSALS_AT_ONCE = 100.0
_CALLERS = 1024
_COMPLAIN_S = 60.0
_WEBSOCKET_REFUSED, _WEBSOCKET_OPEN = 403, 101


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
        line = _ENCODER.encode(entry).encode("ascii") + b"\n"
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


def of_command(command: str, key_id: str | None, owner: str | None) -> dict[str, Any]:
    """Return the line of what was done to keys on the command line of this machine."""
    return {
        "time": round(time.time(), 3),
        "trace": None,
        "key": key_id,
        "owner": owner,
        "method": "COMMAND",
        "route": command,
        "sandbox": None,
        "status": None,
        "peer": f"uid {os.getuid()}",
    }


class Bounded:
    """Lets each caller's refusals through at a bounded pace, and counts the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._callers: OrderedDict[str, tuple[float, float, int]] = OrderedDict()
        """By caller: what is left, since when, how many were left out."""

    def admit(self, caller: str) -> int | None:
        """Return how many were left out since the last that was let through; None: leave it out."""
        now = self._clock()
        left, since, omitted = self._callers.pop(caller, (_REFUSALS_AT_ONCE, now, 0))
        left = min(_REFUSALS_AT_ONCE, left + (now - since) * _REFUSALS_PER_S)
        passed = left >= 1.0
        self._callers[caller] = (left - 1.0, now, 0) if passed else (left, now, omitted + 1)
        if len(self._callers) > _CALLERS:
            self._callers.popitem(last=False)
        return omitted if passed else None


class Paced(logging.Filter):
    """Lets each kind of warning of a logger through at the same pace."""

    def __init__(self) -> None:
        super().__init__()
        self._bounded = Bounded()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged."""
        return record.levelno > logging.WARNING or self._bounded.admit(str(record.msg)) is not None


class Audited:
    """An application whose changes and refusals are written down."""

    def __init__(self, app: ASGIApp, entries: AuditLog, routes: Routes) -> None:
        self._app, self._entries, self._routes = app, entries, routes
        self._refusals = Bounded()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; write a line when the answer begins, or when there will be none."""
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if status is None:
                status = _status(message)
                if status is not None:
                    self._note(scope, status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if status is None:
                self._note(scope, None)

    def _note(self, scope: Scope, status: int | None) -> None:
        refused = status is not None and status >= 400
        method = scope.get("method", "WEBSOCKET")
        if not refused and method in _LOOKS:
            return
        state = scope.get("state") or {}
        identity: Identity | None = state.get("identity")
        peer = (scope.get("client") or ("unix",))[0] or "unix"
        caller = peer if identity is None else identity.name
        omitted = self._refusals.admit(caller) if refused else 0
        if omitted is None:
            return
        template, sandbox = self._routes.find(scope)
        entry: dict[str, Any] = {
            "time": round(time.time(), 3),
            "trace": _trace(scope),
            "key": identity and identity.name,
            "owner": identity and identity.owner,
            "method": method[:_LONGEST],
            "route": template,
            "sandbox": (state.get("sandbox") or sandbox)[:_LONGEST] or None,
            "status": status,
            "peer": peer,
        }
        if omitted:
            entry["omitted"] = omitted
        self._entries.write(entry)
        if refused and identity is None:
            log.warning("%s refused: %s %s: %s", peer, entry["method"], template, status)


def _status(message: Message) -> int | None:
    kind = message["type"]
    if kind == "http.response.start":
        return int(message["status"])
    known = {"websocket.accept": _WEBSOCKET_OPEN, "websocket.close": _WEBSOCKET_REFUSED}
    return known.get(kind)


def _trace(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"traceparent":
            found = _TRACE.match(value)
            return found and found[1].decode()
    return None
