r"""What is written to the shell of a session, and what it reports.

Each command goes in as `command eval '<quoted>'`, followed by a line that writes `$?` to the status
pipe: descriptor 3, which is closed for the command itself. No prompt is scraped and nothing is put
into the output.

`command` keeps POSIX shells alive on syntax errors. At a deadline a trap makes the shell give up
the rest of the command line before its children are killed: in dash and busybox by an expansion
error, which `command` catches, and which would end a shell that runs no command; in bash by
`return` from a script that is read from descriptor 9 (inside a function that would return from the
function alone, so there the shell exits).

Nothing here opens a path that the sandbox could have replaced, /dev/null least of all: it would
stand in every command's way. End of file is an empty here-document, where bash opens /dev/null
itself and gets one that has been read already. Traces (set -x) go where only the host reads.
"""

from __future__ import annotations

import re
import secrets

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import ExecRequest
from coldframe.protocol.text import encoded, excerpt

BASH, POSIX = "bash", ""
"""Kinds of shells, as far as they differ here."""

GIVE_UP_SIGNAL = 50
"""A real-time signal, so that a command's own traps are not in the way."""

MOST_BYTES = 1 << 20
"""Of a command line with its environment: it is noted, quoted and written on the event loop."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOLD = re.compile(rb"\d{1,19}( \w*)?")
_READY = b"""{ \\command printf '%s %s %s\\n' NONCE 0 "${BASH_VERSION:+bash}" >&3; } 2>&3\n"""
_TRAP = (
    b'if [ -n "${BASH_VERSION-}" ]; then\n'
    b"trap 'if [ \"${#FUNCNAME[@]}\" -gt 1 ]; then exit 137; else return 137; fi' 50\n"
    b"else\n"
    b"trap 'case ${coldframe_runs-} in y) { : \"${coldframe_deadline:?}\"; } 2>&-; esac' 50\n"
    b"fi\n"
)
_RUNS = b"{ coldframe_runs=y; } 2>&-"
"""Stands before the command, in its line: from there on `command` catches what the trap raises."""
_REPORT = {
    BASH: b"""{ \\command printf '%s %s\\n' NONCE "$?" >&3; } 2>&3\n""",
    POSIX: b"{ coldframe_runs=$?; "
    b"\\command printf '%s %s\\n' NONCE \"$coldframe_runs\" >&3; } 2>&3\n",
}
_EVAL = {
    BASH: b"{ { \\command read -r _; } 2>&3\n%(before)s"
    b"%(env)s\\command . /proc/self/fd/9 3>&- 9<<'%(nonce)s'\n"
    b"\\command eval %(command)s 9<&-\n%(nonce)s\n"
    b"} <<'%(nonce)s'\n\n%(nonce)s\n",
    POSIX: b"%(env)s\\command eval %(command)s 3>&- <<'%(nonce)s'\n%(nonce)s\n",
}


def new_nonce() -> bytes:
    """Return a word that no command can know beforehand."""
    return b"s" + secrets.token_hex(8).encode()


def greeting(nonce: bytes) -> bytes:
    """Return `ask`, before which a shell learns to give up its command on `GIVE_UP_SIGNAL`."""
    return _TRAP + ask(nonce)


def ask(nonce: bytes) -> bytes:
    """Return a line that makes a shell report `0`, and its kind as `kind_of` reads it."""
    return _READY.replace(b"NONCE", nonce)


def kind_of(answer: bytes) -> str:
    """Return the kind of a shell that has answered `ask`."""
    return BASH if b"bash" in answer else POSIX


def is_report(told: bytes) -> bool:
    """Whether this may stand behind a nonce; what a command has put there itself may not."""
    return _TOLD.fullmatch(told) is not None


def code_of(told: bytes) -> int:
    """Return the exit code of a report: what is left of `$?` once a process has ended with it."""
    return int(told.split()[0]) & 0xFF


def parts(request: ExecRequest) -> tuple[bytes, bytes]:
    """Return a command line, and the assignments that stand before it.

    Raises:
        InvalidRequestError: a NUL in the command, a name that no shell variable can have, or more
            than `MOST_BYTES`.
    """
    command = encoded(request.command or b"", "the command")
    if b"\0" in command:
        raise InvalidRequestError("command: a NUL cannot stand in a command line")
    settings = b"".join(_assignment(name, value) + b" " for name, value in request.env.items())
    size = len(command) + len(settings)
    if size > MOST_BYTES:
        raise InvalidRequestError(
            f"command: a session takes a command line with its env of at most {MOST_BYTES} bytes, "
            f"and this is {size}; write it to a file and source that: `. /the/file`"
        )
    return command, settings


def script(request: ExecRequest, kind: str, nonce: bytes, last_code: int) -> bytes:
    """Return what runs a command line and reports its code under `nonce`. Raises as `parts`."""
    command, settings = parts(request)
    # `$?` of the command before is what the user expects to find; the report has reset it.
    before = b""
    if last_code:
        before = b"case $- in *e*) ;; *) (exit %d) ;; esac" % last_code
    if kind == POSIX:
        command = b"; ".join(filter(None, (_RUNS, before))) + b"; " + command
    text = _EVAL[kind] % {
        b"nonce": nonce,
        b"before": before and before + b"\n",
        b"env": settings,
        b"command": _quoted(command),
    }
    return text + _REPORT[kind].replace(b"NONCE", nonce)


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _assignment(name: str | bytes, value: str | bytes | None) -> bytes:
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    if _NAME.fullmatch(text) is None:
        raise InvalidRequestError(
            f"env: {excerpt(text)} is not a name that a shell variable can have"
        )
    if value is None:
        raise InvalidRequestError(f"env: {excerpt(text)} has no value; unset it in the command")
    return (
        encoded(name, "an environment name")
        + b"="
        + _quoted(encoded(value, f"the value of {name!r}"))
    )
