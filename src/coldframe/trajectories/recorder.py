"""Collects one attempt's steps while they happen, so that an interrupted one keeps its record.

The recorder is fed by the harness and its episode; it never talks to a sandbox or a model.
Everything that it stores has passed the redactor.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coldframe.protocol.errors import ColdframeError, Execution
from coldframe.protocol.models import ExecRequest, ExecResult, Output, ProcessInfo
from coldframe.trajectories.base import BlobRef, OutputRef
from coldframe.trajectories.files import ChangedFiles, Words
from coldframe.trajectories.redaction import Redactor, is_secret_name
from coldframe.trajectories.steps import (
    Call,
    CallError,
    CallOutcome,
    ParseFailure,
    Shown,
    ShownMessage,
    Step,
    Usage,
)
from coldframe.trajectories.store import BlobStore

Source = Literal["model", "solution"]
_NOT_RECORDED = frozenset({"operation_id", "expected_version"})


def plain_text(value: str) -> str:
    """Return text that UTF-8 can hold: names from a sandbox may carry lone surrogates."""
    return value.encode("utf-8", "backslashreplace").decode()


def _plain(value: str | None) -> str | None:
    return None if value is None else plain_text(value)


def plain_process(process: ProcessInfo) -> ProcessInfo:
    """Return the process with a name that JSON can hold."""
    return process.model_copy(update={"name": plain_text(process.name)})


class StepRecord:
    """One step while it is being made."""

    def __init__(self, recorder: Recorder, index: int, source: Source) -> None:
        self._recorder, self._index, self._source = recorder, index, source
        self.started_at = time.time()
        self.action: BlobRef | None = None
        self.finish_reason: str | None = None
        self.usage = Usage()
        self.model_attempts = 0
        self.model_s = 0.0
        self.model_queue_s: float | None = None
        self.parse_failures: list[ParseFailure] = []
        self.calls: list[Call] = []
        self.shown: list[ShownMessage] = []

    def set_action(self, raw: bytes) -> None:
        """Keep the raw action, byte for byte but for known secrets."""
        self.action = self._recorder.blob(raw)

    def parse_failure(self, code: str, message: str, tool_call_id: str | None = None) -> None:
        """Count an action that does not follow the tool schema."""
        said = self._recorder.redactor.text(plain_text(message))
        self.parse_failures.append(
            ParseFailure(code=code, message=said, tool_call_id=_plain(tool_call_id))
        )

    def add(self, call: Call) -> int:
        """Keep a call, and return its index; what became of the files is told later, if at all."""
        self.calls.append(call)
        number = len(self.calls) - 1
        self._recorder.unknown[self._files_of(number)] = (
            "no look was taken after it: it was not executed, or the agent or sandbox ended with it"
        )
        return number

    def files(self, number: int, found: ChangedFiles | str) -> None:
        """Tell what became of the files around a call, or why that is not known."""
        name = self._files_of(number)
        if isinstance(found, str):
            self._recorder.unknown[name] = found
            return
        self.calls[number] = self.calls[number].model_copy(update={"files": found})
        del self._recorder.unknown[name]

    def _files_of(self, number: int) -> str:
        return f"steps.{self._index}.calls.{number}.files"

    def show(
        self,
        text: str,
        *,
        rule: str,
        role: str,
        omitted_characters: int = 0,
        tool_call_id: str | None = None,
    ) -> None:
        """Keep what the model is shown, exactly."""
        blob = self._recorder.blob(text.encode("utf-8", "surrogatepass"))
        shown = Shown(rule=rule, text=blob, omitted_characters=omitted_characters)
        self.shown.append(ShownMessage(role=role, tool_call_id=_plain(tool_call_id), shown=shown))

    def build(self) -> Step:
        """Return the step as it stands now."""
        return Step(
            index=self._index,
            source=self._source,
            action=self.action,
            finish_reason=_plain(self.finish_reason),
            usage=self.usage,
            model_attempts=self.model_attempts,
            parse_failures=tuple(self.parse_failures),
            calls=tuple(self.calls),
            shown=tuple(self.shown),
            started_at=self.started_at,
            ended_at=time.time(),
            model_s=self.model_s,
            model_queue_s=self.model_queue_s,
        )


@dataclass
class Recorder:
    """The record of one attempt; see the module."""

    blobs: BlobStore
    redactor: Redactor
    prompt: list[BlobRef] = field(default_factory=list)
    tool_schemas: list[dict[str, Any]] = field(default_factory=list)
    reported_model: str | None = None
    files_excluded: tuple[str, ...] = ()
    """What the looks at the files left out."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Dotted field of a step → why it is not known."""
    _done: list[Step] = field(default_factory=list)
    _open: StepRecord | None = None

    def blob(self, content: bytes) -> BlobRef:
        """Store bytes without the known secrets."""
        return self.blobs.put(self.redactor.output(content))

    def step(self, source: Source) -> StepRecord:
        """Begin a step; the one before it ends."""
        self.close()
        self._open = StepRecord(self, len(self._done), source)
        return self._open

    def close(self) -> None:
        """End the step that is open, keeping what is known of it."""
        if self._open is not None:
            self._done.append(self._open.build())
            self._open = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps that have ended."""
        return tuple(self._done)

    def output(self, output: Output) -> OutputRef:
        """Store one stream and say whether all of it is there."""
        window = output.window
        clean = self.redactor.output(window)
        redacted = clean != window
        return OutputRef(
            total_bytes=output.total_bytes,
            sha256=output.sha256,
            stored=self.blobs.put(clean),
            complete=output.omitted_bytes == 0 and not redacted,
            redacted=redacted,
        )

    def request(self, request: ExecRequest) -> dict[str, Any]:
        """Return the request as JSON: text where it is text, base64 where it is not."""
        argv = None if request.argv is None else [self.words(one) for one in request.argv]
        return {
            "argv": argv,
            "command": None if request.command is None else self.words(request.command),
            "shell": request.shell,
            "cwd": None if request.cwd is None else self.words(request.cwd),
            "env": self._environment(request.env),
            "user": request.user,
            "stdin": None if request.stdin is None else self.words(request.stdin),
            "deadline_s": request.deadline_s,
            "window_bytes": request.window_bytes,
            "spool_bytes": request.spool_bytes,
            "kill_bytes": request.kill_bytes,
            "pty": None if request.pty is None else request.pty.model_dump(),
        }

    def words(self, value: str | bytes) -> Words:
        """Return text as it is, and bytes that are none in base64; without known secrets."""
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        try:
            return self.redactor.text(raw.decode())
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(self.redactor.output(raw)).decode()}

    def _environment(self, env: Mapping[Any, str | bytes | None]) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        for name, value in env.items():
            key = name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
            hidden = bool(value) and is_secret_name(key)
            clean[plain_text(key)] = (
                "[redacted]" if hidden else None if value is None else self.words(value)
            )
        return clean

    def result(
        self, result: ExecResult, *, started_at: float, wall_s: float, tool_call_id: str | None
    ) -> Call:
        """Return the call of a command that ended."""
        exec_s = max(result.duration_s, 0.0)
        return Call(
            tool_call_id=_plain(tool_call_id),
            operation_id=result.operation_id,
            request=self.request(result.request),
            outcome=CallOutcome.RESULT,
            reason=result.reason,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=self.output(result.out),
            stderr=self.output(result.err),
            resources=result.resources,
            leftovers=tuple(map(plain_process, result.leftovers)),
            started_at=started_at,
            ended_at=started_at + wall_s,
            exec_s=exec_s,
            queue_s=max(wall_s - exec_s, 0.0),
        )

    def error(
        self,
        error: ColdframeError | None,
        command: str | Sequence[str],
        options: Mapping[str, Any],
        *,
        started_at: float,
        wall_s: float,
        tool_call_id: str | None,
    ) -> Call:
        """Return the call of a command without a result; no error means that we ended it.

        The request is the one that was asked for: only a result carries the normalised one.
        """
        if error is None:
            outcome, call_error = CallOutcome.INTERRUPTED, None
        else:
            refused = error.execution is Execution.NOT_EXECUTED
            outcome = CallOutcome.NOT_EXECUTED if refused else CallOutcome.LOST
            message = self.redactor.text(plain_text(str(error)))
            call_error = CallError(code=error.code, side=error.side, message=message)
        line = isinstance(command, str)
        request = {
            "argv": None if line else [self.words(one) for one in command],
            "command": self.words(command) if isinstance(command, str) else None,
            **{name: value for name, value in options.items() if name not in _NOT_RECORDED},
            "env": self._environment(dict(options.get("env") or {})),
        }
        return Call(
            tool_call_id=_plain(tool_call_id),
            operation_id=str(options["operation_id"]),
            request=request,
            outcome=outcome,
            error=call_error,
            started_at=started_at,
            ended_at=started_at + wall_s,
            exec_s=wall_s if outcome is CallOutcome.INTERRUPTED else 0.0,
            queue_s=0.0 if outcome is CallOutcome.INTERRUPTED else wall_s,
        )
