"""Agents for Harbor that do one thing each, and write what they saw to their logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier

from coldframe.protocol.errors import SandboxGoneError
from coldframe.rollouts import scratch
from tests.fixtures.waiting import until, until_asked

MIB = 1 << 20


class _Agent(BaseAgent):
    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    def note(self, **facts: Any) -> None:
        """Write down what was seen, for the test."""
        Path(self.logs_dir, "seen.json").write_text(json.dumps(facts))


class Commands(_Agent):
    """Runs commands that end in every way, and says how Harbor was told."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Every answer is a result: none of these may end the trial."""

        async def told(command: str, **options: Any) -> list[Any]:
            result = await environment.exec(command, **options)
            return [result.return_code, result.stdout, result.stderr]

        streamed: list[str] = []

        async def on_output(text: str, stream: str) -> None:
            streamed.append(f"{stream}:{text}")

        seen = {
            "exit": await told("echo out; echo err >&2; exit 7"),
            "bash": await told("set -o pipefail; [[ a = a ]] && echo $BASH_VERSION"),
            "deadline": await told("echo before; sleep 30", timeout_sec=1),
            "signal": await told("kill -KILL $$"),
            "no-user": await told("true", user="nobody-at-all"),
            "no-directory": await told("true", cwd="/nowhere"),
            "no-path": await told("true", cwd="tmp"),
            "no-text": await told("echo a\0b"),
            "where": await told("pwd; id -un; echo $A", cwd="/srv", user="nobody", env={"A": "b"}),
            "leaves": await told("sleep 30 & echo at once", timeout_sec=20),
        }
        with environment.scoped_output_callback(on_output):
            seen["streamed"] = await told("printf 'a\\303\\251'; echo b >&2")
        self.note(**seen, streamed_text="".join(sorted(streamed)))


class Stalls(_Agent):
    """Is cancelled in the middle of a command, while a task of its own goes on with another."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Harbor's time for it ends first."""
        orphan = asyncio.create_task(environment.exec("exec sleep 7654"))
        self._orphan = orphan
        await environment.exec("setsid sleep 8765 & exec sleep 6543")


class Transfers(_Agent):
    """Carries a tree in and out again."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Modes, links and holes are there and back; what would lead out is not."""
        tree = Path(self.logs_dir, "tree")
        (tree / "below").mkdir(parents=True)
        (tree / "below" / "tool").write_text("x")
        (tree / "below" / "tool").chmod(0o751)
        (tree / "link").symlink_to("below/tool")
        (tree / "twin").hardlink_to(tree / "below" / "tool")
        with (tree / "hole").open("wb") as file:
            file.truncate(1 << 30)
            file.write(b"head")
        await environment.upload_dir(tree, "/srv/tree")
        inside = await environment.exec(
            "cd /srv/tree; stat -c '%n %a %b %h %N' hole below/tool twin link; "
            "ln -s /etc/passwd out; ln -s ../../x up; mkfifo pipe"
        )
        back = Path(self.logs_dir, "back")
        (back / "below").mkdir(parents=True)
        (back / "below" / "tool").write_text("old")
        (back / "link").mkdir()
        await environment.download_dir("/srv/tree", back)
        await environment.upload_file(tree / "below" / "tool", "/srv/new/tool")
        await environment.download_file("/srv/new/tool", Path(self.logs_dir, "file", "tool"))
        await environment.download_dir_with_exclusions(
            source_dir="/srv/tree", target_dir=Path(self.logs_dir, "some"), exclude=["below", "*.x"]
        )
        await environment.download_dir_filtered(
            source_dir="/srv/tree", target_dir=Path(self.logs_dir, "chosen"), include=["below/*"]
        )
        kinds = [
            await environment.is_dir("/srv/tree"),
            await environment.is_dir("/srv/tree/link"),
            await environment.is_file("/srv/tree/link"),
            await environment.is_file("/srv/none"),
        ]
        self.note(inside=inside.stdout, kinds=kinds)


class StartsAgain(_Agent):
    """Starts an environment that was started."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """The first sandbox is asked whether it is still there."""
        first = environment.sandbox
        await environment.start(force_build=False)
        try:
            await first.exec("true")
        except SandboxGoneError:
            self.note(first="gone")


class Loses(_Agent):
    """Has its sandbox die under it."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Delete it behind Harbor's back, as an eviction would."""
        await environment.sandbox.delete()
        await environment.exec("true")


class LosesItsNode(_Agent):
    """Has the node of its sandbox killed under it."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """With a command in flight."""
        running = asyncio.create_task(environment.exec("touch /begun; sleep 600"))
        await until_asked(lambda: environment.sandbox.files.exists("/begun"))
        os.kill(int(os.environ["COLDFRAME_TEST_NODE"]), signal.SIGKILL)
        await running


class Kills(_Agent):
    """Kills Harbor itself once so many trials are in their agent's time."""

    begun = 0

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Wait for the others with a command in flight; the last one ends it all."""
        Kills.begun += 1
        if Kills.begun == int(os.environ["COLDFRAME_TEST_KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        await environment.exec("sleep 600 & sleep 600")


class OwnVerifier(Verifier):
    """Grades by commands of its own, as a judge does."""

    async def verify(self) -> VerifierResult:
        """Look at the tests from a command that is not Harbor's."""
        await self.environment.upload_dir(self.task.paths.tests_dir, "/tests")
        await self.environment.exec("bash /tests/test.sh", user="nobody")
        await self.environment.download_dir("/logs/verifier", self.trial_paths.verifier_dir)
        return VerifierResult(rewards=self._parse_reward_text())


class KillsWhileGrading(Verifier):
    """Kills Harbor while the tests are kept here and the sandbox's files are on their way."""

    async def verify(self) -> VerifierResult:
        """Once it is told to, it is Harbor's own."""
        if "COLDFRAME_TEST_SPARE" in os.environ:
            return await super().verify()
        await self.environment.upload_dir(self.task.paths.tests_dir, "/tests")
        target = self.trial_paths.trial_dir / "usr"
        fetching = asyncio.create_task(self.environment.download_dir("/usr", target))
        await until(lambda: any(target.parent.glob(f"{scratch.PREFIX}*/tree/*")))
        os.kill(os.getpid(), signal.SIGKILL)
        await fetching
        raise AssertionError("SIGKILL was outlived")
