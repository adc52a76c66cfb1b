"""From tasks to rollouts by Harbor jobs: refuse before, run, count twice, check every trial."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from coldframe.integrations.harbor_rl.counting import count_trials
from coldframe.integrations.harbor_rl.provenance import harbor_version, provenance
from coldframe.integrations.harbor_rl.results import (
    Evaluation,
    EvaluationRecord,
    Generation,
    Group,
    Rejected,
)
from coldframe.integrations.harbor_rl.runner import Caps, RunJob, run_harbor_job
from coldframe.integrations.harbor_rl.specs import (
    Phase,
    RLTask,
    check_request,
    field_of,
)
from coldframe.integrations.harbor_rl.trials import evidence, exception_of
from coldframe.learning.contracts import (
    LINEAR,
    ContractError,
    PolicyIdentity,
    PolicyRollout,
    Topology,
)
from coldframe.learning.contracts.values import is_number

AGENT = "terminus-2"
BIG_JOB = 64
"""Trials that are too many to find out by that not one of them may be trained on."""
AGENT_KWARGS: Mapping[str, Any] = {
    "collect_rollout_details": True,
    "enable_summarize": False,
    "record_terminal_session": False,
}
"""What terminus-2 needs to leave one linear conversation with its tokens."""


class HarborRLAdapter:
    """Asks Harbor for samples, and hands on those that may be trained on.

    Args:
        jobs_dir: jobs for training go to `train/` in it, those for evaluation to `eval/`.
        model_name: as the agent is to ask for it.
        environment_type: a type of Harbor's, or the import path `module:Class` of another.
        reward_key: which part of the verdict is the reward.
        run_job: takes Harbor's JobConfig (where Harbor is not installed, the same as a dict) and
            returns its JobResult, now or when awaited. Default: Harbor itself, within `caps`.
        policy: which policy samples; without one nothing may be trained on.
        reward_schema: name and version of what the verdict means, for the manifests of batches.
        topology: how a trial's conversations become rows.
        agent: a name of Harbor's, or an import path.
        agent_kwargs: over what terminus-2 needs.
        api_base, model_info: passed on to the agent.
        agent_timeout_multiplier, max_retries: as Harbor has them. Retries are no samples.
        preflight_task: a small task that is tried before the first job; see `preflight`. Without
            one, the first task of a job of `BIG_JOB` trials or more.
    """

    def __init__(
        self,
        jobs_dir: Path | str,
        model_name: str,
        environment_type: str = "docker",
        reward_key: str = "reward",
        run_job: RunJob | None = None,
        *,
        policy: PolicyIdentity | None = None,
        reward_schema: str | None = None,
        topology: Topology = LINEAR,
        agent: str = AGENT,
        agent_kwargs: Mapping[str, Any] | None = None,
        environment_kwargs: Mapping[str, Any] | None = None,
        api_base: str | None = None,
        model_info: Mapping[str, Any] | None = None,
        agent_timeout_multiplier: float | None = None,
        max_retries: int = 0,
        caps: Caps | None = None,
        preflight_task: RLTask | None = None,
    ) -> None:
        self.jobs_dir, self.model_name = Path(jobs_dir), model_name
        self.environment_type, self.reward_key = environment_type, reward_key
        self.policy, self.topology, self.agent = policy, topology, agent
        self.agent_kwargs = dict(agent_kwargs or {})
        self.environment_kwargs = dict(environment_kwargs or {})
        self.api_base, self.model_info = api_base, model_info
        self.agent_timeout_multiplier, self.max_retries = agent_timeout_multiplier, max_retries
        self.caps, self.reward_schema = caps, reward_schema
        self._preflight_task, self._tried = preflight_task, False
        self._run_job: RunJob = run_job or self._run_here

    def _run_here(self, config: Any) -> Any:
        return run_harbor_job(config, self.caps)

    # --- before a job -----------------------------------------------------------------

    def build_config(
        self,
        specs: Sequence[RLTask],
        *,
        phase: Phase,
        run_id: str,
        attempts: int,
        concurrency: int,
    ) -> Any:
        """Return the job's configuration: Harbor's JobConfig, or the same as a dict without Harbor.

        Raises:
            ContractError: it may not become a job, or the run id was used before.
        """
        check_request(specs, phase=phase, run_id=run_id, attempts=attempts, concurrency=concurrency)
        directory = self.jobs_dir / phase / run_id
        if directory.exists():
            problem = f"{directory} is there already: a run id is never used again"
            raise ContractError(run_id, "run_id", run_id, problem)
        document = self._document(specs, phase, run_id, attempts, concurrency)
        try:
            configs = import_module("harbor.models.job.config")
        except ImportError:
            return document
        return configs.JobConfig.model_validate(document)

    def _document(
        self, specs: Sequence[RLTask], phase: Phase, run_id: str, attempts: int, concurrency: int
    ) -> dict[str, Any]:
        where = "import_path" if ":" in self.environment_type else "type"
        document: dict[str, Any] = {
            "job_name": run_id,
            "jobs_dir": str(self.jobs_dir / phase),
            "n_attempts": attempts,
            "n_concurrent_trials": concurrency,
            "quiet": True,
            "retry": {"max_retries": self.max_retries},
            "environment": {where: self.environment_type, "kwargs": self.environment_kwargs},
            "agents": [self._agent(phase)],
            "tasks": [spec.document for spec in specs],
        }
        if self.agent_timeout_multiplier is not None:
            document["agent_timeout_multiplier"] = self.agent_timeout_multiplier
        return document

    def _agent(self, phase: Phase) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(AGENT_KWARGS) if self.agent == AGENT else {}
        if phase == "eval":
            kwargs.pop("collect_rollout_details", None)
        optional = {"api_base": self.api_base, "model_info": self.model_info}
        kwargs |= {name: value for name, value in optional.items() if value is not None}
        where = "import_path" if ":" in self.agent else "name"
        return {
            where: self.agent,
            "model_name": self.model_name,
            "kwargs": kwargs | self.agent_kwargs,
        }

    # --- jobs -------------------------------------------------------------------------

    async def preflight(self, spec: RLTask, *, run_id: str) -> PolicyRollout:
        """Run one attempt of one task and check it by every gate.

        Raises:
            ContractError: the first gate that it does not pass.
        """
        made = await self._generate([spec], run_id, attempts=1, concurrency=1)
        (group,) = made.groups
        if group.rejected:
            raise group.rejected[0].error
        if not group.rollouts:
            problem = f"the preflight was stopped: {made.stopped}"
            raise ContractError(run_id, "trial_results", made.stopped, problem)
        return group.rollouts[0]

    async def generate(
        self, specs: Sequence[RLTask], *, run_id: str, attempts: int, concurrency: int
    ) -> Generation:
        """Sample each task so many times; every trial becomes a rollout or is rejected by name.

        Raises:
            ContractError: the request may not become a job, its preflight was rejected, or the
                trials that came back are not those that were asked for.
        """
        check_request(
            specs, phase="train", run_id=run_id, attempts=attempts, concurrency=concurrency
        )
        task = self._preflight_task
        if task is None and len(specs) * attempts >= BIG_JOB:
            task = specs[0]
        if task is not None and not self._tried:
            await self.preflight(task, run_id=f"{run_id}.preflight")
            self._tried = True
        return await self._generate(specs, run_id, attempts=attempts, concurrency=concurrency)

    async def _generate(
        self, specs: Sequence[RLTask], run_id: str, *, attempts: int, concurrency: int
    ) -> Generation:
        trials, retries, stopped = await self._run(specs, "train", run_id, attempts, concurrency)
        groups = []
        for spec in specs:
            rollouts: list[PolicyRollout] = []
            rejected: list[Rejected] = []
            for trial in trials[spec.key]:
                try:
                    rollouts.append(self.to_policy_rollout(trial))
                except ContractError as error:
                    rejected.append(Rejected(str(field_of(trial, "trial_name")), error))
            missing = attempts - len(trials[spec.key])
            groups.append(Group(spec.key, tuple(rollouts), tuple(rejected), missing))
        return Generation(run_id, tuple(groups), retries, stopped)

    async def evaluate(
        self, specs: Sequence[RLTask], *, run_id: str, attempts: int, concurrency: int
    ) -> Evaluation:
        """Sample evaluation tasks; rewards only, in a job directory of its own.

        Raises:
            ContractError: as `generate`.
        """
        trials, retries, stopped = await self._run(specs, "eval", run_id, attempts, concurrency)
        records = [self._record(spec.key, trial) for spec in specs for trial in trials[spec.key]]
        return Evaluation(run_id, tuple(records), retries, stopped)

    async def _run(
        self, specs: Sequence[RLTask], phase: Phase, run_id: str, attempts: int, concurrency: int
    ) -> tuple[dict[str, list[Any]], int, str | None]:
        """Run the job; return its trials by task key, how many were retried, and why it stopped."""
        config = self.build_config(
            specs, phase=phase, run_id=run_id, attempts=attempts, concurrency=concurrency
        )
        directory = self.jobs_dir / phase / run_id
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir()  # the id is this job's now, and nobody else's ever again
        except FileExistsError:
            problem = f"{directory} is there already: a run id is never used again"
            raise ContractError(run_id, "run_id", run_id, problem) from None
        result = self._run_job(config)
        if inspect.isawaitable(result):
            result = await result
        stopped = field_of(result, "stopped")
        trials = count_trials(specs, result, run_id, attempts, stopped)
        retries = field_of(result, "n_retries")
        if retries is None:
            retries = field_of(field_of(result, "stats"), "n_retries") or 0
        return trials, retries, stopped

    # --- after a job ------------------------------------------------------------------

    def to_policy_rollout(self, trial: Any) -> PolicyRollout:
        """Return a trial of a training task as a rollout.

        Args:
            trial: Harbor's TrialResult, or the map of a result.json.
        Raises:
            ContractError: it may not be trained on; trial, field and value are named.
        """
        found = evidence(trial, split=self._split(trial), policy=self.policy)
        origin = provenance(trial, reward_schema=self.reward_schema, version=harbor_version())
        return PolicyRollout.from_trial(
            replace(found, provenance=origin), reward_key=self.reward_key, topology=self.topology
        )

    def _split(self, trial: Any) -> str:
        """Return the split of a trial: `eval` if it lies where evaluations do, else `train`."""
        directory = field_of(field_of(trial, "config"), "trials_dir")
        if directory is None:
            return "train"
        ours = (self.jobs_dir / "eval").resolve()
        return "eval" if ours in Path(str(directory)).resolve().parents else "train"

    def _record(self, key: str, trial: Any) -> EvaluationRecord:
        name, task = str(field_of(trial, "trial_name")), str(field_of(trial, "task_name"))
        exceptions = [exception_of(trial)]
        exceptions += [exception_of(step) for step in field_of(trial, "step_results") or ()]
        failure = next((one for one in exceptions if one is not None), None)
        reward = None
        if failure is None:
            try:
                reward = _reward(
                    evidence(trial, split="eval", policy=None).rewards, self.reward_key
                )
            except ContractError as error:
                failure = str(error)
            else:
                failure = None if reward is not None else f"has no finite {self.reward_key!r}"
        return EvaluationRecord(name, task, key, reward, failure)


def _reward(rewards: Any, key: str) -> float | None:
    value = rewards.get(key) if isinstance(rewards, Mapping) else None
    return value if is_number(value) else None
