"""Check that a task is honest: the reference passes, doing nothing and wrong ways fail.

Each of them is run several times, and the same task must come out of it each time: the same
task digest, the same initial state, the same rewards.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from coldframe.protocol.errors import InvalidRequestError
from coldframe.rollouts.attempt import Attempt
from coldframe.rollouts.attempt_settings import AttemptSettings
from coldframe.rollouts.digests import tree_digest
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.progress import telling
from coldframe.rollouts.scratch import scratch
from coldframe.rollouts.summary import passed
from coldframe.rollouts.task import DIGESTED, Task
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import BlobStore

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient

ORACLE, NOP = "oracle", "nop"


@dataclass(frozen=True)
class Contender:
    """One way of treating the task, and whether it ought to pass."""

    name: str
    harness: str
    should_pass: bool
    wrong: str | None = None


@dataclass(frozen=True)
class Trial:
    """One contender, run once."""

    contender: Contender
    trajectory: Trajectory
    passed: bool | None
    """None: there was no verdict."""

    @property
    def as_expected(self) -> bool:
        """Whether it passed if it should, and failed by verdict if it should not."""
        return self.passed is self.contender.should_pass


@dataclass(frozen=True)
class Checked:
    """What came out of checking one task."""

    task: Task
    trials: tuple[Trial, ...]
    problems: tuple[str, ...]

    @property
    def honest(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems

    def report(self) -> dict[str, Any]:
        """Return it as JSON."""
        contenders: dict[str, list[Trial]] = {}
        for trial in self.trials:
            contenders.setdefault(trial.contender.name, []).append(trial)
        states = sorted({one for trial in self.trials if (one := _initial(trial))})
        return {
            "task": self.task.key,
            "digest": self.task.digest,
            "initial_states": states,
            "honest": self.honest,
            "problems": list(self.problems),
            "contenders": {
                name: {
                    "should_pass": trials[0].contender.should_pass,
                    "runs": len(trials),
                    "as_expected": sum(trial.as_expected for trial in trials),
                    "rewards": [trial.trajectory.rewards for trial in trials],
                }
                for name, trials in contenders.items()
            },
        }


def contenders(task: Task) -> tuple[Contender, ...]:
    """Return the reference, the agent that does nothing, and every wrong solution."""
    wrong = (Contender(f"wrong/{name}", ORACLE, False, name) for name in task.wrong)
    return (Contender(ORACLE, ORACLE, True), Contender(NOP, NOP, False), *wrong)


async def check_task(
    client: AsyncSandboxClient,
    images: ImageBuilder,
    task: Task,
    *,
    times: int,
    slots: asyncio.Semaphore,
    heard: Callable[[Trial], None] = lambda trial: None,
    goes_on: Callable[[str, str, float], None] = lambda contender, where, lasted_s: None,
) -> Checked:
    """Run every contender `times` times.

    Args:
        slots: bounds the attempts at a time, over all tasks.
        heard: called after each trial.
        goes_on: called while one takes long, with its contender's name, where it stands and for
            how many seconds it has run.
    Raises:
        InvalidRequestError: times is less than 1.
    """
    if times < 1:
        raise InvalidRequestError(f"--times {times} is less than 1")
    run_id = f"check-{secrets.token_hex(6)}"
    with scratch() as directory:
        blobs = BlobStore(directory)

        async def trial(contender: Contender, number: int) -> Trial:
            settings = AttemptSettings(run_id, contender.harness, wrong=contender.wrong)
            async with slots:
                attempt = Attempt(client, images, blobs, task, settings, sample=number, attempt=0)
                with telling(lambda: attempt.standing, partial(goes_on, contender.name)):
                    trajectory = await attempt.run()
            done = Trial(contender, trajectory, _verdict(trajectory, task.pass_threshold))
            heard(done)
            return done

        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(trial(contender, number))
                for contender in contenders(task)
                for number in range(times)
            ]
        trials = tuple(one.result() for one in running)
    return Checked(task, trials, tuple(_problems(task, trials)))


def _verdict(trajectory: Trajectory, threshold: float) -> bool | None:
    return None if trajectory.rewards is None else passed(trajectory.rewards, threshold)


def _problems(task: Task, trials: tuple[Trial, ...]) -> list[str]:
    unexpected: dict[str, list[str]] = {}
    for trial in trials:
        if not trial.as_expected:
            run = f"{trial.contender.name}, run {trial.trajectory.identity.sample}"
            unexpected.setdefault(_outcome(trial), []).append(run)
    problems = [
        f"{'every run' if len(runs) == len(trials) else '; '.join(runs)}: {outcome}"
        for outcome, runs in unexpected.items()
    ]
    states = {one for trial in trials if (one := _initial(trial))}
    if len(states) > 1:
        problems.append(f"{len(states)} different initial states came out: {sorted(states)}")
    for contender in dict.fromkeys(trial.contender for trial in trials):
        found = [trial.trajectory.rewards for trial in trials if trial.contender == contender]
        if any(one != found[0] for one in found):
            problems.append(f"{contender.name}: rewards differ from run to run: {found}")
    if tree_digest(task.directory, DIGESTED) != task.digest:
        problems.append(f"{task.directory}: the task changed while it was checked")
    if not task.wrong:
        problems.append(
            f"{task.directory / 'wrong'}: no wrong solution, so nothing shows that "
            "the verifier tells right from wrong"
        )
    return problems


def _outcome(trial: Trial) -> str:
    failure = trial.trajectory.failure
    if failure is not None:
        return f"no verdict: {failure.side}: {failure.message}"
    return f"{'passed' if trial.passed else 'failed'} with {trial.trajectory.rewards}"


def _initial(trial: Trial) -> str | None:
    state = trial.trajectory.identity.initial_state
    return None if state is None else state.digest
