"""The reference: uploads the task's solution and runs it as the agent would.

A wrong solution runs the same way; what differs is the directory it is given.
"""

from __future__ import annotations

import asyncio
from typing import Any

from coldframe.harnesses.base import Episode, Offers, Outcome
from coldframe.harnesses.scripts import pack, run_argv
from coldframe.protocol.errors import HarnessError, NotExecutedError
from coldframe.trajectories.schema import Termination

TARGET = "/solution"
BACKSTOP_S = 60.0


class OracleHarness:
    """Runs `solution/solve.sh` with `[solution] env`."""

    name = "oracle"
    version = "1"
    needs_model = False
    needs_solution = True

    def settings(self) -> dict[str, Any]:
        """Return where the solution is put."""
        return {"target": TARGET}

    def refuses(self, offers: Offers) -> str | None:
        """Return nothing: there is nobody to offer anything to."""
        return None

    async def run(self, episode: Episode) -> Outcome:
        """Upload and run; the script's exit code is recorded, the verifier judges.

        Raises:
            HarnessError: there is no solution, or its script cannot be started.
        """
        solution = episode.solution
        if solution is None:
            raise HarnessError("the task has no solution/solve.sh for the oracle to run")
        script = solution.directory / solution.script
        if not script.is_file():
            raise HarnessError(f"{script}: no such file; the oracle runs it")
        step = episode.recorder.step("solution")
        step.set_action(script.read_bytes())
        content = await asyncio.to_thread(pack, solution.directory)
        await episode.sandbox.files.tar_up(TARGET, content, owner=(0, 0))
        try:
            await episode.execute(
                await run_argv(episode.sandbox, script, f"{TARGET}/{solution.script}"),
                env=solution.env,
                # The runner ends the episode at its deadline, and says so; this only holds if the
                # runner is gone.
                deadline_s=episode.remaining_s() + BACKSTOP_S,
                step=step,
            )
        except NotExecutedError as error:
            raise HarnessError(f"{script} could not be started: {error}") from error
        episode.recorder.close()
        return Outcome(Termination.FINISHED)
