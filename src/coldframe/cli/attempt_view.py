"""Show one attempt: its phases, what each step did and printed, how it was graded."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from coldframe.cli import render
from coldframe.cli.progress import outcome
from coldframe.protocol import strict_json
from coldframe.trajectories.base import OutputRef
from coldframe.trajectories.files import ChangedFiles
from coldframe.trajectories.phases import PhaseRecord, TamperEvent
from coldframe.trajectories.schema import TaskStepRecord, Trajectory
from coldframe.trajectories.steps import Call, Step
from coldframe.trajectories.store import BlobStore, StoreError
from coldframe.trajectories.verification import Verification

_USERS = {None: "the image's user", "0": "root"}


def attempt_text(one: Trajectory, blobs: BlobStore, full: bool) -> str:
    identity = one.identity
    lines = [
        f"{identity.task.name}  sample {identity.sample}  attempt {identity.attempt}  "
        f"{identity.harness.name}@{identity.harness.version}",
        f"outcome: {outcome(one)}",
        f"termination: {one.termination.value}",
    ]
    if one.rewards is not None:
        lines.append("rewards: " + ", ".join(f"{k} = {v:g}" for k, v in one.rewards.items()))
    lines += ["", *map(_phase, one.phases)]
    lines += [_tamper(event) for event in one.tamper]
    begun = {step.first_step: step for step in reversed(one.task_steps)}
    for step in one.steps:
        if step.index in begun:
            lines += ["", _task_step(begun[step.index])]
        lines += ["", *_step(step, blobs, full)]
    for name, graded in _verifications(one):
        lines += ["", *_verification(name, graded, blobs, full)]
    lines += [f"warning: {text}" for text in one.warnings]
    return "\n".join(render.safe(line) for line in lines)


def _phase(phase: PhaseRecord) -> str:
    of = "" if phase.step is None else f" of {phase.step}"
    network = ", ".join(phase.network) or "no network"
    seconds = f"{phase.ended_at - phase.started_at:.2f} s"
    text = f"phase {phase.name}{of}  {seconds}  {network}  as {_USERS.get(phase.user, phase.user)}"
    for word, processes in (("killed", phase.killed), ("lived on", phase.survivors)):
        if processes:
            text += f"  {word}: " + ", ".join(f"{one.name} ({one.pid})" for one in processes)
    egress = phase.egress
    if egress.asked:
        text += "  egress: " + ", ".join(f"{count} {kind}" for kind, count in egress.asked.items())
    if egress.left_out or egress.lost:
        text += f" ({egress.left_out} not kept, {egress.lost} lost)"
    return text


def _tamper(event: TamperEvent) -> str:
    void = "the verdict is void" if event.voided else "the verdict stands"
    return f"tamper: {event.what}: {event.path}: {event.before} -> {event.after}; {void}"


def _task_step(step: TaskStepRecord) -> str:
    if step.rewards is not None:
        end = ", ".join(f"{name} = {value:g}" for name, value in step.rewards.items())
    else:
        end = "no verdict" if step.failure is None else f"failure {step.failure.code}"
    stopped = "  below min_reward: the last" if step.min_reward_missed else ""
    return f"task step {step.name}  {step.termination.value}  {end}{stopped}"


def _verifications(one: Trajectory) -> list[tuple[str, Verification]]:
    found = [("", one.verification)] + [(step.name, step.verification) for step in one.task_steps]
    return [(name, graded) for name, graded in found if graded is not None]


def _verification(name: str, graded: Verification, blobs: BlobStore, full: bool) -> list[str]:
    of = f" of {name}" if name else ""
    lines = [f"verifier{of} ({graded.mode}): exit code {graded.exit_code}, reason {graded.reason}"]
    if graded.forgeable:
        lines.append("  something of the agent's lived meanwhile and could have forged it")
    artifacts = graded.artifacts
    if artifacts is not None and (artifacts.count or artifacts.refused):
        lines.append(f"  {artifacts.count} artifacts of {artifacts.bytes} bytes")
        lines += [f"  without {one.path}: {one.reason}" for one in artifacts.refused]
    for output in (graded.stdout, graded.stderr):
        lines += _text(output, blobs, full)
    return lines


def _step(step: Step, blobs: BlobStore, full: bool) -> list[str]:
    took = "" if step.source == "solution" else f"  {render.seconds(step.model_s)} s"
    lines = [f"step {step.index}  {step.source}{took}"]
    lines += [f"  : {line}" for line in _some(_said(step, blobs), full)]
    lines += [f"  parse failure {one.code}: {one.message}" for one in step.parse_failures]
    for call in step.calls:
        first, *more = command_line(call.request).split("\n")
        lines += [f"  $ {first}", *(f"  > {line}" for line in more)]
        lines.append(f"    {_ending(call)}  {call.exec_s:.3f} s{_files(call.files)}")
        for output in (call.stdout, call.stderr):
            lines += _text(output, blobs, full)
    return lines


def _said(step: Step, blobs: BlobStore) -> list[str]:
    """What the model said beside its calls; nothing where its answer cannot be read."""
    if step.action is None or step.source == "solution":
        return []
    try:
        answer = strict_json.parse(blobs.get(step.action))
        of_atif = step.source == "atif"
        said = answer["message"] if of_atif else answer["choices"][0]["message"]["content"]
    except (StoreError, ValueError, LookupError, TypeError):
        return []
    return said.strip().splitlines() if isinstance(said, str) else []


def command_line(request: Mapping[str, Any]) -> str:
    """Return a recorded command as one would type it; arguments that are no text by base64."""
    argv = request.get("argv")
    return shlex.join(map(str, argv)) if argv else str(request.get("command"))


def _files(files: ChangedFiles | None) -> str:
    if files is None:
        return "  files: not known"
    return f"  files: +{files.created} ~{files.changed} -{files.removed}"


def _ending(call: Call) -> str:
    if call.error is not None:
        return f"{call.outcome.value}: {call.error.message}"
    if call.reason is None:
        return call.outcome.value
    code = call.exit_code if call.exit_code is not None else f"signal {call.signal}"
    return f"{call.reason.value} {code}"


def _text(output: OutputRef | None, blobs: BlobStore, full: bool) -> list[str]:
    if output is None or output.total_bytes == 0:
        return []
    try:
        lines = blobs.get(output.stored).decode("utf-8", "replace").splitlines()
    except StoreError as error:
        return [f"    ! {error}"]
    return [f"    | {line}" for line in _some(lines, full)]


def _some(lines: list[str], full: bool) -> list[str]:
    return lines if full or len(lines) <= 20 else [*lines[:10], "...", *lines[-10:]]
