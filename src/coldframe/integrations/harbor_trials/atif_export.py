"""Write a trajectory as ATIF 1.7, which Harbor from 0.18 on takes. See docs/atif.md

Token ids and log-probabilities come from the attempt's journal of calls, and stand with the step
whose answer they are; where that is not certain they are left out, and the notes say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from coldframe.integrations.harbor_trials.steps import PARTS_RULE
from coldframe.protocol import strict_json
from coldframe.protocol.errors import ColdframeError, Side
from coldframe.trajectories.base import BlobRef
from coldframe.trajectories.calls import CallLine, CapturedCalls
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.steps import Call, Step
from coldframe.trajectories.store import BlobStore

SCHEMA = "ATIF-v1.7"
Json = dict[str, Any]


class AtifExportError(ColdframeError):
    """A trajectory holds what ATIF cannot; names the attempt and the field."""

    code = "atif_export_refused"
    side = Side.CALLER


def to_atif(
    trajectory: Trajectory, blobs: BlobStore, name: str, calls: CapturedCalls | None = None
) -> Json:
    """Return a trajectory as an ATIF document.

    Args:
        name: of the attempt: TASK.SAMPLE.ATTEMPT.
        calls: the journal of its calls, if it was captured.
    Raises:
        AtifExportError: it has no step, which ATIF must have, or holds what is none of ours.
        StoreError: a blob is missing or was changed.
    """
    return _Exporter(trajectory, blobs, name, calls).document()


class _Exporter:
    def __init__(
        self, trajectory: Trajectory, blobs: BlobStore, name: str, calls: CapturedCalls | None
    ) -> None:
        self._one, self._blobs, self._name = trajectory, blobs, name
        self._notes: list[str] = []
        self._calls = self._matched(calls)

    def document(self) -> Json:
        one = self._one
        steps = [{"step_id": number, **step} for number, step in enumerate(self._steps(), start=1)]
        if not steps:
            told = "the agent was given nothing and did nothing"
            if "steps" in one.unknown:
                told = f"unknown, {one.unknown['steps']}"
            raise AtifExportError(
                f"{self._name}: steps: {told}; ATIF holds no document without a step"
            )
        harness, model = one.identity.harness, one.identity.model
        agent: Json = {"name": harness.name, "version": harness.version}
        if model is not None and model.name is not None:
            agent["model_name"] = model.name
        if harness.tool_schemas:
            agent["tool_definitions"] = list(harness.tool_schemas)
        if harness.settings:
            agent["extra"] = harness.settings
        document: Json = {
            "schema_version": SCHEMA,
            "session_id": f"{one.identity.run_id}/{self._name}",
            "trajectory_id": self._name,
            "agent": agent,
            "steps": steps,
            "final_metrics": self._final(len(steps)),
            "extra": {"coldframe": self._ending()},
        }
        if self._notes:
            document["notes"] = "; ".join(dict.fromkeys(self._notes))
        return document

    def _final(self, steps: int) -> Json:
        totals = self._one.totals
        found = {
            "total_prompt_tokens": totals.prompt_tokens,
            "total_completion_tokens": totals.completion_tokens,
            "total_steps": steps,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _ending(self) -> Json:
        """Return what ATIF has no field for: which task, which verdict, or whose failure."""
        one = self._one
        failure = one.failure
        return {
            "schema_version": one.schema_version,
            "task": one.identity.task.model_dump(mode="json"),
            "sample": one.identity.sample,
            "attempt": one.identity.attempt,
            "termination": one.termination.value,
            "rewards": one.rewards,
            "failure": None if failure is None else failure.model_dump(mode="json"),
            "origin": None if one.origin is None else one.origin.model_dump(mode="json"),
            "unknown": dict(one.unknown),
        }

    # --- steps ----------------------------------------------------------------------------

    def _steps(self) -> Iterator[Json]:
        prompts = {step.first_step: step.prompt for step in reversed(self._one.task_steps)}
        if not self._one.task_steps:
            prompts = {0: self._one.identity.harness.prompt}
        for step in self._one.steps:
            yield from self._prompt(prompts.pop(step.index, ()))
            yield from self._step(step)
        for left in prompts.values():  # of what ended before its first action
            yield from self._prompt(left)

    def _prompt(self, messages: Sequence[BlobRef]) -> Iterator[Json]:
        for blob in messages:
            message = self._object(blob, "prompt")
            source = "system" if message.get("role") == "system" else "user"
            yield {"source": source, "message": self._content(message.get("content"))}

    def _step(self, step: Step) -> Iterator[Json]:
        if step.source == "atif":
            made = self._imported(step)
        elif step.source == "solution":
            made = self._solution(step)
        elif _answered(step):
            made = self._acted(step)
        else:
            self._notes.append(f"step {step.index}: the model gave no answer, so it is left out")
            return
        if step.started_at is not None:
            made["timestamp"] = self._moment(step.started_at, f"steps.{step.index}.started_at")
        known = {one["tool_call_id"] for one in made.get("tool_calls", ())}
        results: list[Json] = []
        after: list[Json] = []
        for message in step.shown:
            text = self._blobs.get(message.shown.text).decode("utf-8", "replace")
            content = self._content(_parts(text) if message.shown.rule == PARTS_RULE else text)
            if message.role == "tool":
                call = message.tool_call_id
                source = {"source_call_id": call} if call in known else {}
                results.append({**source, "content": content})
            else:
                source_name = "system" if message.role == "system" else "user"
                after.append({"source": source_name, "message": content})
        if results:
            made["observation"] = {"results": results}
        yield made
        yield from after

    def _acted(self, step: Step) -> Json:
        """Return a step of a model's: its answer, as chat completions have it."""
        message = self._message(step)
        made: Json = {
            "source": "agent",
            "message": self._content(message.get("content")),
            "llm_call_count": 1,
        }
        if isinstance(message.get("reasoning_content"), str):
            made["reasoning_content"] = message["reasoning_content"]
        calls = [_tool_call(one) for one in message.get("tool_calls") or ()]
        if calls:
            made["tool_calls"] = calls
        usage = step.usage
        metrics: Json = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        }
        captured = self._calls.get(step.index)
        if captured is not None:
            prompt, call = captured
            metrics |= {
                "prompt_token_ids": list(prompt),
                "completion_token_ids": list(call.completion_token_ids or ()),
                "logprobs": list(call.logprobs or ()),
            }
        made["metrics"] = {name: one for name, one in metrics.items() if one is not None}
        if step.calls:
            made["extra"] = {"commands": [_ran(one) for one in step.calls]}
        return made

    def _solution(self, step: Step) -> Json:
        script = "" if step.action is None else self._blobs.get(step.action)
        text = script if isinstance(script, str) else script.decode("utf-8", "replace")
        made: Json = {"source": "agent", "message": text, "llm_call_count": 0}
        if step.calls:
            made["extra"] = {"commands": [_ran(one) for one in step.calls]}
        return made

    def _imported(self, step: Step) -> Json:
        """Return a step that was ATIF already; what it refers to outside is named, not taken."""
        assert step.action is not None
        raw = self._object(step.action, f"steps.{step.index}.action")
        left_out = {"step_id", "observation", "is_copied_context"}
        made = {name: value for name, value in raw.items() if name not in left_out}
        made["message"] = self._content(raw.get("message"))
        return {name: value for name, value in made.items() if value is not None}

    def _message(self, step: Step) -> Json:
        assert step.action is not None
        try:
            answer = strict_json.parse(self._blobs.get(step.action))
            message = answer["choices"][0]["message"]
        except (ValueError, LookupError, TypeError):
            self._notes.append(f"step {step.index}: the answer is no chat completion, so not told")
            return {}
        return message if isinstance(message, dict) else {}

    def _object(self, blob: BlobRef, field: str) -> Json:
        try:
            value = strict_json.parse(self._blobs.get(blob))
        except strict_json.NotStrictError as error:
            raise AtifExportError(f"{self._name}: {field}: {error}") from None
        if not isinstance(value, dict):
            raise AtifExportError(f"{self._name}: {field}: is no JSON object")
        return value

    def _moment(self, seconds: float, field: str) -> str:
        try:
            return datetime.fromtimestamp(seconds, UTC).isoformat()
        except (ValueError, OverflowError, OSError):
            raise AtifExportError(f"{self._name}: {field}: {seconds:g} is no time") from None

    def _content(self, content: Any) -> Any:
        """Return a message as ATIF has it: text, or parts; files beside it are only named."""
        if content is None:
            return ""
        if isinstance(content, str):
            # ATIF is JSON, and what is shown may hold half a character.
            return content.encode("utf-8", "replace").decode()
        if not isinstance(content, list):
            return json.dumps(content)
        parts = []
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            else:
                self._notes.append("media are named, and not carried")
                parts.append({"type": "text", "text": json.dumps(part)})
        return parts

    # --- tokens ---------------------------------------------------------------------------

    def _matched(
        self, calls: CapturedCalls | None
    ) -> Mapping[int, tuple[tuple[int, ...], CallLine]]:
        """Return the call of each of the model's steps, if all of them match one by one."""
        if calls is None:
            return {}
        steps = [step for step in self._one.steps if step.source == "model" and _answered(step)]
        turns = calls.turns
        fits = len(steps) == len(turns) and all(
            turn.call.message == self._message(step)
            for step, turn in zip(steps, turns, strict=True)
        )
        if not fits:
            self._notes.append("token ids left out: calls and steps do not match one by one")
            return {}
        return {
            step.index: (turn.prompt_token_ids, turn.call)
            for step, turn in zip(steps, turns, strict=True)
            if turn.call.completion_token_ids is not None
        }


def _answered(step: Step) -> bool:
    """Tell whether a request of the model was answered: the last of an attempt may not be."""
    return step.action is not None


def _parts(text: str) -> Any:
    try:
        return strict_json.parse(text)
    except strict_json.NotStrictError:
        return text


def _tool_call(call: Any) -> Json:
    """Return a tool call; ATIF holds arguments parsed, so what is no object stands beside them."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    written = function.get("arguments")
    try:
        arguments = strict_json.parse(written) if isinstance(written, str) else None
    except strict_json.NotStrictError:
        arguments = None
    made: Json = {
        "tool_call_id": str(call.get("id", "")) if isinstance(call, dict) else "",
        "function_name": str(function.get("name", "")),
        "arguments": arguments if isinstance(arguments, dict) else {},
        "extra": {"arguments": written},
    }
    return made


def _ran(call: Call) -> Json:
    """Return what is known of a command, without its output."""
    return {
        "operation_id": call.operation_id,
        "tool_call_id": call.tool_call_id,
        "outcome": call.outcome.value,
        "reason": None if call.reason is None else call.reason.value,
        "exit_code": call.exit_code,
        "signal": call.signal,
        "exec_s": call.exec_s,
        "stdout_sha256": None if call.stdout is None else call.stdout.sha256,
        "stderr_sha256": None if call.stderr is None else call.stderr.sha256,
    }
