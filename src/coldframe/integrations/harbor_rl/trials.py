"""Read a trial of Harbor's as evidence for the contract. Nothing is checked or mended here.

Trials come as Harbor's `TrialResult` or as the map of a result.json, of 0.18 or later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from coldframe.integrations.harbor_rl.specs import field_of
from coldframe.integrations.harbor_trials.reading import Folder, ImportRefusedError
from coldframe.integrations.harbor_trials.reward_files import hold_to_files, reward_files
from coldframe.learning.contracts import (
    ContractError,
    PolicyIdentity,
    Segment,
    Totals,
    Trial,
    TrialStep,
)


def evidence(trial: Any, *, split: str, policy: PolicyIdentity | None) -> Trial:
    """Return what a trial says of itself.

    Raises:
        ContractError: a reward file beside it says something else than the result, or is a link.
    """
    name = str(field_of(trial, "trial_name"))
    steps = field_of(trial, "step_results") or ()
    found = Trial(
        trial_name=name,
        task_name=field_of(trial, "task_name"),
        split=split,
        rewards=_rewards(trial),
        segments=_segments(field_of(trial, "agent_result")),
        steps=tuple(
            TrialStep(
                name=field_of(step, "step_name"),
                segments=_segments(field_of(step, "agent_result")),
                rewards=_rewards(step),
                exception=exception_of(step),
            )
            for step in steps
        ),
        exception=exception_of(trial),
        policy=policy,
    )
    directory = _directory(field_of(trial, "trial_uri"))
    if directory is not None:
        _hold_to_directory(found, directory)
    return found


def _hold_to_directory(found: Trial, directory: Path) -> None:
    """Hold a trial to what its verifiers left; a sandbox may have written there, links too."""
    parts: list[tuple[tuple[str, ...], Any]] = [
        (("steps", str(step.name), "verifier"), step.rewards) for step in found.steps
    ]
    try:
        with Folder.opened(directory) as folder:
            for where, rewards in parts or [(("verifier",), found.rewards)]:
                files = reward_files(folder, *where)
                hold_to_files(found.trial_name, rewards, files, "/".join(where))
    except ImportRefusedError as error:
        raise ContractError(
            found.trial_name, error.file, error.field, error.problem, rule="reward_file"
        ) from error


def exception_of(part: Any) -> str | None:
    """Return the exception of a trial or step in words, or None."""
    info = field_of(part, "exception_info")
    if info is None:
        return None
    kind = field_of(info, "exception_type") or type(info).__name__
    return f"{kind}: {field_of(info, 'exception_message') or ''}".rstrip(": ")


def _rewards(part: Any) -> Any:
    result = field_of(part, "verifier_result")
    return None if result is None else field_of(result, "rewards")


def _segments(agent_result: Any) -> tuple[Segment, ...]:
    """Return one segment per rollout detail; the first is the main one by Harbor's convention."""
    details = field_of(agent_result, "rollout_details") if agent_result is not None else None
    if not isinstance(details, Sequence):
        return ()
    segments = tuple(
        Segment(
            prompt_token_ids=field_of(detail, "prompt_token_ids"),
            completion_token_ids=field_of(detail, "completion_token_ids"),
            logprobs=field_of(detail, "logprobs"),
            name="main" if index == 0 else f"detail-{index}",
        )
        for index, detail in enumerate(details)
    )
    given = [field_of(agent_result, name) for name in ("n_input_tokens", "n_output_tokens")]
    if len(segments) == 1 and all(type(count) is int for count in given):
        return (replace(segments[0], totals=Totals(given[0], given[1])),)
    return segments


def _directory(uri: Any) -> Path | None:
    """Return the trial's directory, if it is on this machine."""
    try:
        parts = urlsplit(uri) if isinstance(uri, str) else None
    except ValueError:  # brackets that hold no address; which ones do so changes with Python
        return None
    if parts is None or parts.scheme != "file":
        return None
    directory = Path(unquote(parts.path))
    return directory if directory.is_dir() else None
