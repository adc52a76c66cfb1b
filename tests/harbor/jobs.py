"""Run one batch of tasks by both roads, and say of each attempt what it came to."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.job import Job
from harbor.models.job.config import JobConfig

from coldframe.integrations.harbor_trials.endings import ending_of
from coldframe.integrations.harbor_trials.results import ExceptionInfo, Part
from coldframe.rollouts.directory import RunDirectory

IMPORT_PATH = "coldframe.integrations.harbor:ColdframeEnvironment"
CONCURRENCY = 4
Outcome = float | str | None
"""A reward, or the code of why there is none."""


@dataclass(frozen=True)
class Trial:
    """One trial of Harbor's: where it lies, and its result as Harbor's model."""

    directory: Path
    result: Any

    @property
    def outcome(self) -> Outcome:
        """The reward, or the code by which it would be imported, a step's among them."""
        verdict = self.result.verifier_result
        if verdict is not None and verdict.rewards:
            return float(verdict.rewards["reward"])
        steps = [one.exception_info for one in self.result.step_results or ()]
        infos = [one for one in (self.result.exception_info, *steps) if one is not None]
        ends = [
            ending_of("", Part(exception_info=ExceptionInfo.model_validate(one.model_dump())), {})
            for one in infos
        ]
        return next((end.failure.code for end in ends if end.failure is not None), None)


def run_job(
    tasks: Path,
    jobs_dir: Path,
    *,
    agent: dict[str, Any],
    concurrency: int = CONCURRENCY,
    attempts: int = 1,
    verifier: str | None = None,
    **kwargs: Any,
) -> dict[str, Trial]:
    """Run a Harbor job on our environment; return the trials by task directory and number."""
    name = str(agent.get("name") or agent["import_path"]).rpartition(":")[2]
    config = JobConfig(
        job_name=name,
        jobs_dir=jobs_dir,
        n_concurrent_trials=concurrency,
        n_attempts=attempts,
        quiet=True,
        environment={"import_path": IMPORT_PATH, "kwargs": kwargs},
        agents=[agent],
        **({} if verifier is None else {"verifier": {"import_path": verifier}}),
        datasets=[{"path": tasks}],
    )

    async def run() -> Any:
        job = await Job.create(config)
        return await job.run()

    results = asyncio.run(run()).trial_results
    found: dict[str, Trial] = {}
    for one in results:
        key = Path(one.config.task.path).name
        if attempts > 1:
            key = one.trial_name
        assert key not in found, f"{key} was tried twice"
        found[key] = Trial(jobs_dir / name / one.trial_name, one)
    return found


def roll_out(tasks: Path, out: Path, harness: str) -> dict[str, Outcome]:
    """Run the same by `coldframe rollout run`; what a run there has done is not done again."""
    command = ["rollout", "run", str(tasks), "--harness", harness, "--out", str(out)]
    command += ["--concurrency", str(CONCURRENCY), "--attempts", "1"]
    ended = subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", *command],
        env=os.environ | {"TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    directories = {one.name: one for one in tasks.iterdir() if (one / "task.toml").is_file()}
    results = RunDirectory(out).results()
    by_digest = {
        Path(one.identity.task.key).name: one.failure.code if one.failure else one.score
        for one in results.values()
    }
    assert set(by_digest) <= set(directories), ended.stdout + ended.stderr
    return dict(by_digest)
