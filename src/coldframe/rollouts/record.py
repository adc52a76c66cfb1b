"""The record of an attempt: who it was, what happened, and what is not known of it."""

from __future__ import annotations

import math
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from coldframe.protocol import PROTOCOL_VERSION
from coldframe.rollouts import verifier as grading
from coldframe.trajectories.files import FileDiff
from coldframe.trajectories.identity import (
    HarnessIdentity,
    Identity,
    ModelIdentity,
    TaskIdentity,
    VerifierIdentity,
    Versions,
)
from coldframe.trajectories.redaction import redact_url
from coldframe.trajectories.schema import (
    PolicyFailure,
    TaskStepRecord,
    Termination,
    Times,
    Trajectory,
)
from coldframe.trajectories.totals import known_sum, totals

if TYPE_CHECKING:
    from coldframe.harnesses.base import Outcome
    from coldframe.rollouts.attempt import Attempt
    from coldframe.rollouts.stage import Stage
    from coldframe.rollouts.task import Task
    from coldframe.trajectories.verification import Verification

_POLICY_ENDINGS = {
    Termination.AGENT_DEADLINE,
    Termination.STEP_LIMIT,
    Termination.TOKEN_LIMIT,
    Termination.CONTEXT_LIMIT,
    Termination.PARSE_FAILURES,
}


def trajectory(attempt: Attempt, started_at: float) -> Trajectory:
    """Return the record of an attempt that has ended."""
    steps = attempt.recorder.steps
    termination = attempt.outcome.termination
    return Trajectory(
        identity=_identity(attempt),
        started_at=started_at,
        ended_at=time.time(),
        steps=steps,
        termination=termination,
        policy_failure=_policy_failure(attempt, attempt.outcome),
        phases=attempt.phases.records,
        task_steps=_task_steps(attempt),
        tamper=tuple(event for stage in attempt.stages for event in stage.tampering.events),
        verification=_verification(attempt),
        rewards=None if attempt.failure else attempt.rewards,
        failure=attempt.failure,
        final_state=attempt.final,
        file_diff=_file_diff(attempt),
        files_excluded=attempt.recorder.files_excluded,
        times=_times(attempt),
        totals=totals(steps),
        warnings=tuple(attempt.warnings),
        unknown=_unknown(attempt),
    )


def _policy_failure(attempt: Attempt, outcome: Outcome) -> PolicyFailure | None:
    if outcome.termination not in _POLICY_ENDINGS:
        return None
    return PolicyFailure(code=outcome.termination.value, message=attempt.clean(outcome.message))


def _verification(attempt: Attempt) -> Verification | None:
    """Return that of a task's only step; several have theirs with them."""
    if attempt.task.multi_step or not attempt.stages:
        return None
    return attempt.stages[0].verification


def _task_steps(attempt: Attempt) -> tuple[TaskStepRecord, ...]:
    if not attempt.task.multi_step:
        return ()
    return tuple(_task_step(attempt, stage) for stage in attempt.stages)


def _task_step(attempt: Attempt, stage: Stage) -> TaskStepRecord:
    steps = attempt.recorder.steps[stage.first_step : stage.end_step]
    return TaskStepRecord(
        name=stage.step.name or "",
        first_step=stage.first_step,
        end_step=stage.end_step,
        prompt=stage.prompt,
        termination=stage.outcome.termination,
        policy_failure=_policy_failure(attempt, stage.outcome),
        rewards=None if stage.failure else stage.rewards,
        failure=stage.failure,
        verification=stage.verification,
        min_reward_missed=stage.stopped,
        model_s=known_sum(step.model_s for step in steps),
        exec_s=math.fsum(call.exec_s for step in steps for call in step.calls),
        verify_s=stage.verify_s,
        totals=totals(steps),
    )


def _file_diff(attempt: Attempt) -> FileDiff | None:
    before, after = attempt.initial, attempt.final
    if before is None or after is None:
        return None
    changed = before.files != after.files
    return FileDiff(
        before=before.files, after=after.files, changed=changed, excluded=after.excluded
    )


def _times(attempt: Attempt) -> Times:
    spent = attempt.clock.seconds
    known = {
        "create_s": spent.get("create", 0.0),
        "model_s": math.fsum(step.model_s or 0.0 for step in attempt.recorder.steps),
        "exec_s": math.fsum(call.exec_s for step in attempt.recorder.steps for call in step.calls),
        "verify_s": spent.get("verify", 0.0),
        "delete_s": spent.get("delete", 0.0),
    }
    total = spent.get("total", 0.0)
    return Times(
        queue_s=attempt.queue_s,
        image_s=spent.get("image", 0.0),
        other_s=max(total - sum(known.values()), 0.0),
        total_s=total,
        **known,
    )


def _identity(attempt: Attempt) -> Identity:
    task, settings = attempt.task, attempt.settings
    seed = None if settings.seed is None else settings.seed + attempt.sample
    return Identity(
        run_id=settings.run_id,
        task=TaskIdentity(
            key=task.key,
            name=task.name,
            digest=task.digest,
            schema_version=task.schema_version,
            source=task.source,
            repository_commit=task.repository_commit,
            network_declared=task.environment.network_declared,
        ),
        sample=attempt.sample,
        attempt=attempt.number,
        trace_id=attempt.trace_id,
        seed=seed,
        sandbox_id=None if attempt.sandbox is None else attempt.sandbox.id,
        image=attempt.image,
        initial_state=attempt.initial,
        model=_model(attempt),
        harness=HarnessIdentity(
            name=attempt.harness.name,
            version=attempt.harness.version,
            settings=_harness_settings(attempt),
            tool_schemas=tuple(attempt.recorder.tool_schemas),
            prompt=() if task.multi_step else tuple(attempt.recorder.prompt),
        ),
        verifier=VerifierIdentity(
            name=_verifier_name(task), version=grading.VERSION, digest=task.tests_digest
        ),
        versions=_versions(attempt),
    )


def _verifier_name(task: Task) -> str:
    """Return in which mode the steps are graded."""
    modes = {"separate" if step.verifier.separate else "shared" for step in task.steps}
    return "+".join(sorted(modes))


def _harness_settings(attempt: Attempt) -> dict[str, Any]:
    limits = vars(attempt.settings.limits)
    seconds = {step.name or "": attempt.agent_s(step) for step in attempt.task.steps}
    wall_s = seconds if attempt.task.multi_step else seconds[""]
    chosen = {**attempt.harness.settings(), "limits": {**limits, "wall_s": wall_s}}
    return chosen if attempt.settings.wrong is None else {**chosen, "wrong": attempt.settings.wrong}


def _model(attempt: Attempt) -> ModelIdentity | None:
    model, reported = attempt.settings.model, attempt.recorder.reported_model
    if model is None or not attempt.harness.needs_model:
        return None
    return ModelIdentity(
        name=model.name,
        base_url=redact_url(model.base_url),
        reported_name=None if reported is None else attempt.clean(reported),
        policy_version=model.policy_version,
        tokenizer=model.tokenizer,
        renderer=model.renderer,
        sampling=model.sampling(),
    )


def _versions(attempt: Attempt) -> Versions:
    protocol = attempt.details.get("spawner_protocol")
    binary = attempt.details.get("injected_binary_sha256")
    return Versions(
        client=package_version(),
        protocol=PROTOCOL_VERSION,
        spawner_protocol=protocol if isinstance(protocol, int) else None,
        node=attempt.node,
        injected_binary_sha256=binary if isinstance(binary, str) else None,
        runtime=attempt.runtime,
        python=platform.python_version(),
        kernel=os.uname().release,
    )


def _unknown(attempt: Attempt) -> dict[str, str]:
    """Return every field of the design's list that this record does not know, and why."""
    unknown = {**attempt.recorder.unknown, **attempt.phases.unknown, **attempt.unknown}
    if attempt.settings.model is not None and attempt.settings.endpoint is None:
        unknown["token_ids"] = "not captured; `coldframe rollout run --capture tokens` does it"
    identity = _identity(attempt)
    for name, value, why in (
        ("identity.task.repository_commit", identity.task.repository_commit, "no repository"),
        ("identity.seed", identity.seed, "no seed was asked for"),
        ("identity.image", identity.image, "no sandbox was made"),
        ("identity.initial_state", identity.initial_state, "no sandbox was ready"),
        ("final_state", attempt.final, "the agent's time did not end with a live sandbox"),
        ("identity.versions.spawner_protocol", identity.versions.spawner_protocol, "not told"),
        (
            "identity.versions.injected_binary_sha256",
            identity.versions.injected_binary_sha256,
            "the runtime does not tell",
        ),
    ):
        if value is None:
            unknown.setdefault(name, why)
    if identity.model is not None:
        for name in ("reported_name", "policy_version", "tokenizer", "renderer"):
            if getattr(identity.model, name) is None:
                unknown[f"identity.model.{name}"] = "not told"
    return unknown


def package_version() -> str:
    """Return Coldframe's version, or `unknown` from a bare source tree."""
    try:
        return version("coldframe")
    except PackageNotFoundError:
        return "unknown"
