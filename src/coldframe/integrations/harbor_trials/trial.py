"""Make a trajectory of a trial. What Harbor did not keep is None, and `unknown` says so."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from coldframe.integrations.harbor_trials.atif import (
    Found,
    read_conversation,
)
from coldframe.integrations.harbor_trials.endings import Ending, ending_of
from coldframe.integrations.harbor_trials.reading import (
    Folder,
    ImportRefusedError,
    parse,
    validated,
)
from coldframe.integrations.harbor_trials.results import Part, TrialResult, moment
from coldframe.integrations.harbor_trials.reward_files import reward_files
from coldframe.integrations.harbor_trials.steps import kept_documents, read_steps
from coldframe.trajectories.base import BlobRef
from coldframe.trajectories.identity import (
    HarnessIdentity,
    Identity,
    ModelIdentity,
    TaskIdentity,
    VerifierIdentity,
    Versions,
)
from coldframe.trajectories.origin import Origin
from coldframe.trajectories.redaction import Redactor, redact_url
from coldframe.trajectories.schema import TaskStepRecord, Termination, Times, Trajectory
from coldframe.trajectories.steps import Step
from coldframe.trajectories.store import BlobStore
from coldframe.trajectories.totals import Totals, totals

_NOT_KEPT = "Harbor does not keep it"
_UNKNOWN = {
    "identity.task.digest": "Harbor's checksum follows a rule of its own; see origin.task_checksum",
    **dict.fromkeys(
        (
            *("clock", "phases", "final_state", "file_diff", "verification", "totals.cpu_s"),
            *("identity.task.schema_version", "identity.verifier.digest", "identity.image"),
            *("identity.initial_state", "identity.seed", "totals.memory_peak_bytes"),
            *("identity.versions.client", "identity.versions.protocol"),
            *("identity.versions.python", "identity.versions.kernel"),
            *("identity.model.sampling", "identity.model.policy_version"),
            *("identity.model.tokenizer", "identity.model.renderer"),
            *(f"times.{name}_s" for name in ("queue", "image", "model", "exec", "delete", "other")),
            *("task_steps[].min_reward_missed", "steps[].started_at", "steps[].model_attempts"),
        ),
        _NOT_KEPT,
    ),
    "steps[].action": "ATIF holds the agent's reading of an answer, not the answer itself",
    "steps[].calls": "ATIF holds tool calls and what came of them, not what was executed",
    "totals.calls": "see steps[].calls",
    "steps[].parse_failures": "ATIF does not tell them apart",
    "totals.parse_failures": "see steps[].parse_failures",
}


class Place(NamedTuple):
    """What a trial is called here."""

    run_id: str
    task: str
    sample: int
    runner_version: str | None


class Acted(NamedTuple):
    """What the agent did in a trial, or in a step of one."""

    prompt: tuple[BlobRef, ...]
    steps: tuple[Step, ...]
    documents: tuple[Found, ...]


def read_result(trial: Folder) -> tuple[TrialResult, str] | None:
    """Return a trial's result and its SHA-256; None if it has none, since it did not end.

    Raises:
        ImportRefusedError: it is no such result.
    """
    content = trial.read("result.json")
    if content is None:
        return None
    file = f"{trial.shown}/result.json"
    value = parse(content, file)
    return validated(TrialResult, value, file), hashlib.sha256(content).hexdigest()


def trajectory_of(
    trial: Folder, result: TrialResult, digest: str, place: Place, blobs: BlobStore
) -> Trajectory:
    """Return a trial as a trajectory; its documents go to `blobs` as they are.

    Raises:
        ImportRefusedError: a link or a name that leads out of the trial stands in it.
    """
    return _Builder(trial, result, digest, place, blobs).build()


class _Builder:
    def __init__(
        self, trial: Folder, result: TrialResult, digest: str, place: Place, blobs: BlobStore
    ) -> None:
        self._trial, self._result, self._digest = trial, result, digest
        self._place, self._blobs = place, blobs
        self._unknown = dict(_UNKNOWN)
        self._warnings: list[str] = []

    def build(self) -> Trajectory:
        result = self._result
        steps, task_steps, documents, prompt = self._acted()
        ending = self._ending(task_steps)
        return Trajectory(
            identity=self._identity(prompt, documents),
            origin=Origin(
                runner="harbor",
                runner_version=self._place.runner_version,
                trial_name=result.trial_name,
                task_checksum=result.task_checksum,
                result_sha256=self._digest,
                documents=kept_documents(documents, self._blobs),
            ),
            started_at=self._known("started_at", moment(result.started_at)),
            ended_at=self._known("ended_at", moment(result.finished_at)),
            clock=None,
            steps=steps,
            termination=ending.termination,
            policy_failure=ending.policy_failure,
            task_steps=task_steps,
            rewards=ending.rewards,
            failure=ending.failure,
            times=self._times(),
            totals=_totals(steps),
            warnings=tuple(self._warnings),
            unknown=self._unknown,
        )

    # --- what the agent did ---------------------------------------------------------------

    def _acted(
        self,
    ) -> tuple[
        tuple[Step, ...], tuple[TaskStepRecord, ...], tuple[Found, ...], tuple[BlobRef, ...]
    ]:
        if self._result.step_results is None:
            acted = self._conversation("agent", first=0)
            return acted.steps, (), acted.documents, acted.prompt
        steps: list[Step] = []
        records: list[TaskStepRecord] = []
        documents: list[Found] = []
        for part in self._result.step_results:
            acted = self._conversation("steps", part.step_name, "agent", first=len(steps))
            ending = self._ended(part, "steps", part.step_name, "verifier")
            records.append(
                TaskStepRecord(
                    name=part.step_name,
                    first_step=len(steps),
                    end_step=len(steps) + len(acted.steps),
                    prompt=acted.prompt,
                    termination=ending.termination,
                    policy_failure=ending.policy_failure,
                    rewards=ending.rewards,
                    failure=ending.failure,
                    model_s=None,
                    exec_s=None,
                    verify_s=part.verifier.seconds if part.verifier else None,
                    totals=_totals(acted.steps),
                )
            )
            steps += acted.steps
            documents += acted.documents
        prompt = tuple(blob for record in records for blob in record.prompt)
        return tuple(steps), tuple(records), tuple(documents), prompt

    def _conversation(self, *directory: str, first: int) -> Acted:
        """Return what the agent wrote down of itself; what is no ATIF is told, and not read."""
        where = "/".join(directory)
        try:
            found = read_conversation(self._trial, directory)
        except ImportRefusedError as error:
            self._lost(str(error))
            return Acted((), (), ())
        if found is None:
            self._lost(f"{where}/trajectory.json: the agent left none")
            return Acted((), (), ())
        self._warnings += found.missing
        prompt, steps = read_steps(found, self._blobs, first)
        return Acted(prompt, steps, tuple(found.documents))

    def _lost(self, why: str) -> None:
        self._unknown.setdefault("steps", why)
        self._warnings.append(f"no steps: {why}")

    # --- what it came to ------------------------------------------------------------------

    def _ending(self, steps: tuple[TaskStepRecord, ...]) -> Ending:
        """Return how the trial ended; the exception of a step is its own as well."""
        if self._result.exception_info is None:
            for part, step in zip(self._result.step_results or (), steps, strict=True):
                if part.exception_info is not None and step.failure is not None:
                    message = f"step {step.name}: {step.failure.message}"
                    failure = step.failure.model_copy(update={"message": message})
                    return Ending(None, failure, step.termination, step.policy_failure)
        files = () if steps else ("verifier",)
        ending = self._ended(self._result, *files)
        if steps and ending.termination is Termination.UNKNOWN:
            last = steps[-1]
            return ending._replace(termination=last.termination, policy_failure=last.policy_failure)
        return ending

    def _ended(self, part: Part, *verifier: str) -> Ending:
        files = reward_files(self._trial, *verifier) if verifier else {}
        return ending_of(self._result.trial_name, part, files)

    def _times(self) -> Times:
        result = self._result
        begun, ended = moment(result.started_at), moment(result.finished_at)
        graded = result.verifier
        if result.step_results is not None:
            graded = None  # each step has its own
        return Times(
            create_s=self._known(
                "times.create_s",
                result.environment_setup.seconds if result.environment_setup else None,
            ),
            verify_s=self._known("times.verify_s", graded.seconds if graded else None),
            total_s=self._known(
                "times.total_s", None if begun is None or ended is None else ended - begun
            ),
            **dict.fromkeys(("queue_s", "image_s", "model_s", "exec_s", "delete_s", "other_s")),
        )

    def _known(self, name: str, value: float | None) -> float | None:
        if value is None:
            self._unknown[name] = "the trial's result does not say it"
        return value

    # --- who ------------------------------------------------------------------------------

    def _identity(self, prompt: tuple[BlobRef, ...], documents: tuple[Found, ...]) -> Identity:
        result, place = self._result, self._place
        version = place.runner_version
        if version is None:
            self._unknown["identity.verifier.version"] = "the job's lock does not name Harbor's"
        tools = documents[0].document.agent.tool_definitions if documents else None
        if tools is None:
            self._unknown["identity.harness.tool_schemas"] = "the agent does not say"
        agent = result.agent_info
        return Identity(
            run_id=place.run_id,
            task=TaskIdentity(
                key=place.task,
                name=result.task_name,
                digest=None,
                schema_version=None,
                source=result.source,
                repository_commit=result.config.task.git_commit_id,
            ),
            sample=place.sample,
            attempt=0,
            trace_id=result.id,
            model=_model(result),
            harness=HarnessIdentity(
                name=agent.name,
                version=agent.version,
                settings=Redactor().json(result.config.agent.kwargs),
                tool_schemas=tuple(tools or ()),
                prompt=prompt,
            ),
            verifier=VerifierIdentity(name="harbor", version=version, digest=None),
            versions=Versions(client=None, protocol=None, python=None, kernel=None),
        )


def _model(result: TrialResult) -> ModelIdentity | None:
    info, asked = result.agent_info.model_info, result.config.agent
    if info is None and asked.model_name is None:
        return None
    base_url = asked.kwargs.get("api_base")
    return ModelIdentity(
        name=asked.model_name or (info.name if info else None),
        base_url=redact_url(base_url) if isinstance(base_url, str) else None,
    )


def _totals(steps: tuple[Step, ...]) -> Totals:
    """Sum the steps; what ran, and what of it was no tool call, ATIF does not say."""
    unknown: Mapping[str, None] = dict.fromkeys(("calls", "parse_failures"))
    return totals(steps).model_copy(update={**unknown, "cpu_s": None, "memory_peak_bytes": None})
