"""A fake environment and a fake agent, so that a true Harbor job runs without any sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

PROMPTS, COMPLETIONS = [[1, 2], [1, 2, 3, 4, 5]], [[3, 4], [6]]
LOGPROBS = [[-0.5, -0.25], [-1.5]]


class FakeEnvironment(BaseEnvironment):
    """Runs nothing; its verifier's reward is what `rewards` says of the task.

    That is the text of reward.txt, a map of files, or a list of either by step.
    """

    def __init__(self, *args: Any, rewards: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._rewards = rewards or {}
        self.episodes = 0
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "fake"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, mounted=False)

    def _validate_definition(self) -> None:
        return

    async def start(self, force_build: bool) -> None:
        return

    async def stop(self, delete: bool) -> None:
        return

    async def upload_file(self, source_path: Any, target_path: Any) -> None:
        return

    async def upload_dir(self, source_dir: Any, target_dir: Any) -> None:
        return

    async def download_file(self, source_path: Any, target_path: Any) -> None:
        self._write(str(source_path), Path(target_path).parent)

    async def download_dir(self, source_dir: Any, target_dir: Any) -> None:
        self._write(str(source_dir), Path(target_dir))

    def _write(self, source: str, target: Path) -> None:
        if "verifier" not in source:
            return
        target.mkdir(parents=True, exist_ok=True)
        written = self._rewards.get(self.environment_name, "1")
        if isinstance(written, list):
            written = written[self.episodes - 1]
        files = written if isinstance(written, dict) else {"reward.txt": written}
        for name, text in files.items():
            (target / name).write_text(text)

    async def exec(self, command: str, **_: Any) -> ExecResult:
        return ExecResult(stdout="", stderr="", return_code=0)


class FakeAgent(BaseAgent):
    """Leaves the rollout details that its keyword `scenarios` names for the task."""

    def __init__(self, *args: Any, scenarios: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scenarios = scenarios or {}

    @staticmethod
    def name() -> str:
        return "fake-agent"

    def version(self) -> str:
        return "1.0.0"

    async def setup(self, environment: Any) -> None:
        return

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        environment.episodes += 1
        scenario = self._scenarios.get(environment.environment_name, "whole")
        if scenario == "slow":
            await asyncio.sleep(0.1)
        if scenario == "fails":
            raise RuntimeError("the agent failed")
        detail: dict[str, Any] = json.loads(
            json.dumps(
                {
                    "prompt_token_ids": PROMPTS,
                    "completion_token_ids": COMPLETIONS,
                    "logprobs": LOGPROBS,
                }
            )
        )
        for column in ("prompt_token_ids", "completion_token_ids"):
            detail[column] = [
                [token + 100 * (environment.episodes - 1) for token in row]
                for row in detail[column]
            ]
        details = [detail]
        if scenario == "ids dropped":
            del detail["completion_token_ids"][0], detail["logprobs"][0]
        if scenario == "nan":
            detail["logprobs"][1][0] = float("nan")
        if scenario == "turns lost here and there":
            del detail["prompt_token_ids"][0]
            del detail["completion_token_ids"][1], detail["logprobs"][1]
        if scenario == "sub-agent":
            details.append(
                {"prompt_token_ids": [[9]], "completion_token_ids": [[8]], "logprobs": [[-1.0]]}
            )
        context.rollout_details = details
        context.n_input_tokens, context.n_output_tokens, context.cost_usd = 7, 3, 0.5
