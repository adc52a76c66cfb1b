"""Trajectories of every kind that ATIF has to hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coldframe.protocol.errors import Side
from coldframe.trajectories.base import BlobRef
from coldframe.trajectories.calls import (
    AttemptLine,
    CallLine,
    CapturedCalls,
    EndLine,
    Level,
    MarkLine,
    encode,
    read_calls,
)
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.schema import (
    Failure,
    TaskStepRecord,
    Termination,
    Times,
    Trajectory,
)
from coldframe.trajectories.store import BlobStore
from coldframe.trajectories.totals import totals
from tests.unit.trajectories.samples import exec_result, identity

PROMPTS, COMPLETIONS = [[1, 2], [1, 2, 3, 4, 5]], [[3, 4], [6]]
LOGPROBS = [[-0.1, -1e-300], [-0.3]]
MESSAGES: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "think",
        "tool_calls": [
            {"id": "c0", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
            {"id": "c1", "function": {"name": "bash", "arguments": "{broken"}},
        ],
    },
    {"role": "assistant", "content": "done \ud800"},
]


def every_kind(
    blobs: BlobStore, directory: Path
) -> dict[str, tuple[Trajectory, CapturedCalls | None]]:
    """Return attempts by name, one with the journal of its calls."""
    acted = modelled(blobs)
    steps = acted.steps
    record = TaskStepRecord(
        name="one",
        first_step=0,
        end_step=len(steps),
        prompt=_prompt(blobs),
        termination=Termination.FINISHED,
        rewards={"reward": 1.0},
        totals=totals(steps),
    )
    later = record.model_copy(
        update={"name": "two", "first_step": 2, "end_step": 2, "totals": totals(())}
    )
    failure = Failure(side=Side.VERIFIER, code="x", message="x", phase="verify")
    return {
        "modelled.0.0": (acted, None),
        "captured.0.0": (acted, journal(directory)),
        "steps.0.0": (acted.model_copy(update={"task_steps": (record, later)}), None),
        "failed.0.0": (acted.model_copy(update={"rewards": None, "failure": failure}), None),
        "solved.0.0": (solved(blobs), None),
    }


def modelled(blobs: BlobStore) -> Trajectory:
    """Return an attempt of a model's."""
    recorder = Recorder(blobs, Redactor())
    for message in MESSAGES:
        step = recorder.step("model")
        step.set_action(json.dumps({"choices": [{"message": message}]}).encode())
        for call in message.get("tool_calls", ()):
            step.calls.append(
                recorder.result(exec_result(), started_at=1.0, wall_s=1.0, tool_call_id=call["id"])
            )
            step.show("out \ud800", rule="whole@1", role="tool", tool_call_id=call["id"])
        step.show("to whom nobody called", rule="whole@1", role="tool", tool_call_id="nobody")
        step.show("go on", rule="whole@1", role="user")
    recorder.close()
    return _attempt(blobs, recorder)


def solved(blobs: BlobStore) -> Trajectory:
    """Return an attempt of the task's own solution."""
    recorder = Recorder(blobs, Redactor())
    step = recorder.step("solution")
    step.set_action(b"#!/bin/sh\n\xff")
    step.calls.append(recorder.result(exec_result(), started_at=1.0, wall_s=1.0, tool_call_id=None))
    recorder.close()
    return _attempt(blobs, recorder)


def journal(directory: Path, messages: list[dict[str, Any]] | None = None) -> CapturedCalls:
    """Return the journal of an attempt's calls, as it is read back from disk."""
    path = directory / "calls.jsonl"
    begin = AttemptLine(
        attempt_id="a", key_sha256="0" * 64, model="m", capture=Level.TOKENS, started_at=0.0
    )
    lines = [encode(begin)]
    length = 0
    for number, message in enumerate(messages or MESSAGES):
        call = CallLine(
            call_id=f"call-{number}",
            segment=0,
            extends=length,
            level=Level.TOKENS,
            prompt_token_ids=tuple(PROMPTS[number][length:]),
            completion_token_ids=tuple(COMPLETIONS[number]),
            logprobs=tuple(LOGPROBS[number]),
            message=message,
            dialect="chat",
            sampling_asked={},
            sampling_sent={"temperature": 1.0},
            started_at=1.0,
            latency_s=0.1,
        )
        length = len(PROMPTS[number]) + len(COMPLETIONS[number])
        lines += [encode(call), encode(MarkLine(type="delivered", call_id=call.call_id))]
    path.write_bytes(b"".join([*lines, encode(EndLine(at=2.0))]))
    return read_calls(path)


def _prompt(blobs: BlobStore) -> tuple[BlobRef, ...]:
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "do it"}]
    return tuple(blobs.put(json.dumps(one).encode()) for one in messages)


def _attempt(blobs: BlobStore, recorder: Recorder) -> Trajectory:
    who = identity()
    harness = who.harness.model_copy(
        update={"prompt": _prompt(blobs), "tool_schemas": ({"type": "function"},)}
    )
    return Trajectory(
        identity=who.model_copy(update={"harness": harness}),
        started_at=1.0,
        ended_at=2.0,
        steps=recorder.steps,
        termination=Termination.FINISHED,
        rewards={"reward": 1.0},
        times=Times(),
        totals=totals(recorder.steps),
    )
