"""Small valid trajectories."""

from __future__ import annotations

from coldframe.protocol.errors import Side
from coldframe.protocol.models import ExecRequest, ExecResult, Output, Reason
from coldframe.trajectories.identity import (
    HarnessIdentity,
    Identity,
    TaskIdentity,
    VerifierIdentity,
    Versions,
)
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.schema import Failure, Termination, Times, Trajectory
from coldframe.trajectories.store import BlobStore
from coldframe.trajectories.totals import totals

DIGEST = "0" * 64


def exec_result(stdout: bytes = b"out\n", *, exit_code: int = 0, **values: object) -> ExecResult:
    """Return how a command ended."""
    base: dict[str, object] = {
        "operation_id": "op-1",
        "sandbox_id": "sb-000000-0000000000",
        "reason": Reason.EXIT,
        "exit_code": exit_code,
        "out": Output(total_bytes=len(stdout), head=stdout),
        "started_at": 1.0,
        "ended_at": 2.0,
        "duration_s": 1.0,
        "request": ExecRequest(command="true", env={"API_KEY": "hidden"}),
    }
    return ExecResult.model_validate(base | values)


def identity(task: str = "one", sample: int = 0, attempt: int = 0) -> Identity:
    """Return the identity of an attempt."""
    return Identity(
        run_id="run-1",
        task=TaskIdentity(key=task, name=task, digest=DIGEST, schema_version="1.3"),
        sample=sample,
        attempt=attempt,
        trace_id="t",
        harness=HarnessIdentity(name="nop", version="1"),
        verifier=VerifierIdentity(name="shared", version="1", digest=DIGEST),
        versions=Versions(client="0", protocol=1, python="3", kernel="6"),
    )


def trajectory(
    blobs: BlobStore,
    *,
    task: str = "one",
    sample: int = 0,
    attempt: int = 0,
    reward: float | None = 1.0,
    side: Side = Side.STARTUP,
    retryable: bool = True,
) -> Trajectory:
    """Return a trajectory with one step; without a reward it ends in a failure."""
    recorder = Recorder(blobs, Redactor())
    step = recorder.step("model")
    step.set_action(b'{"raw": 1}')
    step.calls.append(recorder.result(exec_result(), started_at=1.0, wall_s=1.5, tool_call_id="c"))
    step.show("out", rule="whole@1", role="tool", tool_call_id="c")
    recorder.close()
    failure = Failure(side=side, code="x", message="x", phase="create", retryable=retryable)
    return Trajectory(
        identity=identity(task, sample, attempt),
        started_at=1.0,
        ended_at=2.0,
        steps=recorder.steps,
        termination=Termination.FINISHED if reward is not None else Termination.FAILED,
        rewards=None if reward is None else {"reward": reward},
        failure=None if reward is not None else failure,
        times=Times(create_s=1.0, model_s=2.0, exec_s=3.0, verify_s=4.0, delete_s=5.0),
        totals=totals(recorder.steps),
        unknown={"identity.seed": "no seed was asked for"},
    )
