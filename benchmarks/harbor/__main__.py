"""`python -m benchmarks.harbor --json`: the same small tasks, the same image, 16 at a time.

Harbor runs in the environment that `make harbor` makes; give another by `--python`. The engine is a
dockerd of our own in a directory of its own, without networks, and is gone afterwards. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.compare import Unavailable
from benchmarks.harbor.engine import engine

IMAGE = "debian:bookworm"
TASKS = 8
JOB_MAX_S = 900
PYTHON = "build/harbor-0.18.0/bin/python"
TOML = f"""\
schema_version = "1.3"
[task]
name = "bench/%s"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 120.0
[environment]
docker_image = "{IMAGE}"
memory_mb = 512
cpus = 1
"""


def write_tasks(directory: Path) -> None:
    """Write tasks that take no time of their own: all that is measured is the way to them."""
    for number in range(TASKS):
        task = directory / f"task-{number}"
        files = {
            "task.toml": TOML % task.name,
            "instruction.md": "Write the number.\n",
            "environment/.keep": "",
            "solution/solve.sh": f"#!/bin/sh\necho {number} > /tmp/number\n",
            "tests/test.sh": f"#!/bin/sh\n[ $(cat /tmp/number) = {number} ]\n"
            "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        }
        for name, text in files.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)


def run_job(python: str, scratch: Path, trials: int, environment: str, **env: str) -> Any:
    """Run one Harbor job and return what it measured.

    Args:
        env: variables for Harbor.

    Raises:
        Unavailable: it did not end well; the message has its last words.
    """
    attempts = str(max(1, trials // TASKS))
    places = (str(scratch / "tasks"), str(scratch / "jobs"))
    command = [python, "-m", "benchmarks.harbor.job", *places, attempts, environment]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=JOB_MAX_S,
        env=os.environ | {"PYTHONPATH": "src:.", "HARBOR_TELEMETRY": "0"} | env,
    )
    if ended.returncode:
        raise Unavailable(f"the job failed: {ended.stderr.strip()[-400:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def measure(python: str, trials: int, docker_trials: int) -> dict[str, Any]:
    """Run both and compare."""
    found: dict[str, Any] = {"image": IMAGE, "concurrency": 16, "failures": {}}
    with tempfile.TemporaryDirectory(prefix="coldframe-bench-") as name:
        scratch = Path(name)
        write_tasks(scratch / "tasks")
        ours = run_job(python, scratch, trials, "coldframe")
        found |= {"harbor": ours["harbor"], "coldframe_trials": ours["trials"]}
        found["coldframe_trials_per_s"] = ours["trials_per_s"]
        found["failures"]["coldframe"] = ours["failures"]
        try:
            with engine(IMAGE, scratch) as env:
                theirs = run_job(python, scratch, docker_trials, "docker", **env)
        except Unavailable as error:
            found |= {"docker_trials_per_s": None, "ratio": None, "docker_unavailable": str(error)}
            return found
    found["docker_trials"] = theirs["trials"]
    found["docker_trials_per_s"] = theirs["trials_per_s"]
    found["failures"]["docker"] = theirs["failures"]
    found["ratio"] = round(ours["trials_per_s"] / theirs["trials_per_s"], 2)
    return found


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.harbor")
    parser.add_argument("--json", action="store_true", help="one line of JSON only")
    parser.add_argument("--python", default=PYTHON, help="that has Harbor")
    parser.add_argument("--trials", type=int, default=160)
    parser.add_argument("--docker-trials", type=int, default=32)
    said = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engine must not stay behind
    if not Path(said.python).exists():
        print(f"{said.python} is not there: make harbor", file=sys.stderr)
        return 2
    found = measure(said.python, said.trials, said.docker_trials)
    print(json.dumps(found, indent=None if said.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
