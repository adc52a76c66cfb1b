"""What a verifier itself has left beside Harbor's result, and whether that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coldframe.integrations.harbor_trials.reading import Folder
from coldframe.learning.contracts import ContractError
from coldframe.protocol.errors import RewardInvalidError
from coldframe.protocol.text import excerpt
from coldframe.rollouts.rewards import MAX_REWARD_BYTES, parse_reward

REWARD_FILES = ("reward.json", "reward.txt")


def reward_files(trial: Folder, *directory: str) -> dict[str, bytes]:
    """Return the verifier's reward files that are there.

    Raises:
        ImportRefusedError: one is a link, no file, or larger than any reward.
    """
    found = {name: trial.read(*directory, name, limit=MAX_REWARD_BYTES) for name in REWARD_FILES}
    return {name: content for name, content in found.items() if content is not None}


def hold_to_files(trial: str, rewards: Any, files: Mapping[str, bytes], where: str) -> None:
    """Hold a result to the verifier's own file: Harbor makes numbers of text and bools.

    Args:
        files: the reward files that are there, by name.
        where: names their directory in messages.
    Raises:
        ContractError: there are two files, it is no reward by our rules, or it says otherwise.
    """
    if not files or rewards is None:
        return
    (name, content), *others = files.items()
    field = f"{where}/{name}"
    if others:
        problem = "there are two reward files, and one of them may be the agent's"
        raise ContractError(trial, field, list(files), problem, rule="reward_file")
    try:
        written = parse_reward(content, name)
    except RewardInvalidError as error:
        problem = f"is no reward: {error}"
        raise ContractError(trial, field, content[:80], problem, rule="reward_file") from error
    if not isinstance(rewards, Mapping) or dict(rewards) != written:
        problem = f"is not what the result says, {excerpt(str(rewards))}"
        raise ContractError(trial, field, written, problem, rule="reward_file")
