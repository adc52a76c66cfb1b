"""Turn how a command ended here into what Harbor knows: two texts and a return code.

| reason | return code |
|---|---|
| exit | the command's own |
| signal | 128 + its number |
| deadline | 124, as `timeout` has it |
| oom | 137 |
| output_limit | 153 |
| sandbox_gone, infrastructure | 125: nothing is known of what the command did |
| not started | 127 no such program, else 126 |
"""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable

from harbor.environments.base import ExecResult

from coldframe.client import AsyncOutputStream
from coldframe.protocol.errors import ColdframeError, ProgramNotFoundError, ShellNotFoundError
from coldframe.protocol.models import ExecResult as Ended
from coldframe.protocol.models import Reason

_CODES = {
    Reason.DEADLINE: 124,
    Reason.SANDBOX_GONE: 125,
    Reason.INFRASTRUCTURE: 125,
    Reason.OOM: 137,
    Reason.OUTPUT_LIMIT: 153,
}

OnOutput = Callable[..., Awaitable[None]]
"""Harbor's callback: a text, and `stdout` or `stderr`."""


def of_ended(result: Ended) -> ExecResult:
    """Return what Harbor is told of a command that was started."""
    code = _CODES.get(result.reason)
    note = ""
    if code is not None:
        after = (
            f" after {result.request.deadline_s:g} s" if result.reason is Reason.DEADLINE else ""
        )
        note = f"\ncoldframe: the command was ended: {result.reason}{after}\n"
    elif result.exit_code is not None:
        code = result.exit_code
    else:
        code = 128 + (result.signal or 0)
    return ExecResult(
        stdout=_text(result.out.window), stderr=_text(result.err.window) + note, return_code=code
    )


def of_not_executed(error: ColdframeError) -> ExecResult:
    """Return what Harbor is told of a command that was not started."""
    absent = isinstance(error, ProgramNotFoundError | ShellNotFoundError)
    return ExecResult(stdout="", stderr=f"coldframe: {error}\n", return_code=127 if absent else 126)


def _text(window: bytes) -> str:
    return window.decode("utf-8", "replace")


async def passed_on(stream: AsyncOutputStream, callback: OnOutput) -> Ended:
    """Run a streaming command to its end and hand on what it writes; return how it ended."""
    decoders = {
        name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
    }
    async for chunk in stream:
        text = decoders[chunk.stream].decode(chunk.data, chunk.eof)
        if text:
            await callback(text, str(chunk.stream))
    return stream.result
