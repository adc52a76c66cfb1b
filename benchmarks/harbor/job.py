"""One Harbor job, in a Python that has Harbor; prints one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harbor.job import Job
from harbor.models.job.config import JobConfig

CONCURRENCY = 16
ENVIRONMENTS = {
    "coldframe": {"import_path": "coldframe.integrations.harbor:ColdframeEnvironment"},
    "docker": {"type": "docker"},
}


async def run(tasks: Path, jobs: Path, attempts: int, environment: str) -> dict[str, Any]:
    """Try each task so often with the oracle; the time is that of the job, imports left out."""
    config = JobConfig(
        job_name=environment,
        jobs_dir=jobs,
        n_concurrent_trials=CONCURRENCY,
        n_attempts=attempts,
        quiet=True,
        environment=ENVIRONMENTS[environment],
        agents=[{"name": "oracle"}],
        datasets=[{"path": tasks}],
    )
    job = await Job.create(config)
    begun = time.perf_counter()
    result = await job.run()
    took = time.perf_counter() - begun
    failures: dict[str, int] = {}
    for one in result.trial_results:
        info, verdict = one.exception_info, one.verifier_result
        if info is not None:
            failures[info.exception_type] = failures.get(info.exception_type, 0) + 1
        elif verdict is None or verdict.rewards != {"reward": 1.0}:
            failures["wrong reward"] = failures.get("wrong reward", 0) + 1
    count = len(result.trial_results)
    return {
        "harbor": version("harbor"),
        "trials": count,
        "trials_per_s": round(count / took, 3),
        "failures": failures,
    }


if __name__ == "__main__":
    given = sys.argv[1:]
    found = asyncio.run(run(Path(given[0]), Path(given[1]), int(given[2]), given[3]))
    print(json.dumps(found))
