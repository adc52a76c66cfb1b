"""A batch: many tasks, samples and faults, and a directory that says what came of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coldframe.cli.rollout import exit_code
from coldframe.client import AsyncSandboxClient
from coldframe.harnesses.base import ModelSettings
from coldframe.host.egress import steering
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import CreateError, RunError, Side
from coldframe.rollouts import progress
from coldframe.rollouts.config import RunConfig
from coldframe.rollouts.directory import AttemptKey, RunDirectory
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import load_task
from coldframe.rollouts.progress import Silent
from coldframe.rollouts.run import Batch, RunResult
from coldframe.trajectories.schema import Trajectory
from tests.doubles.model_endpoint import Bash, Http, ModelEndpoint, Say, tool_call
from tests.fixtures.waiting import until_asked
from tests.integration.rollouts.conftest import all_begun
from tests.integration.rollouts.test_attempt import GRADED, make_task
from tests.unit.rollouts.tasks import BASE, write_task

pytestmark = pytest.mark.root


async def run_batch(client: AsyncSandboxClient, tasks: Path, out: Path, **config: Any) -> RunResult:
    chosen = RunConfig(tasks=(tasks,), **{"harness": "oracle", **config})
    return await Batch(client, chosen, RunDirectory(out), host_env={"HOME": "/root"}).run()


async def test_run_of_tasks_and_samples_writes_everything_it_promises(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """The control: every sample a verdict, every file there and readable."""
    make_task(tmp_path / "tasks", "solved")
    make_task(tmp_path / "tasks", "unsolved", solution__solve_sh="#!/bin/sh\n")
    result = await run_batch(
        native_async_client, tmp_path / "tasks", tmp_path / "out", samples=3, concurrency=3
    )

    assert result.all_verdicts
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary == result.summary
    solved, unsolved = summary["tasks"]["solved"], summary["tasks"]["unsolved"]
    assert (solved["passes"], solved["mean_reward"], solved["pass_at_k"]["3"]) == (3, 1.0, 1.0)
    assert (unsolved["passes"], unsolved["mean_reward"], unsolved["missing"]) == (0, 0.0, 0)
    found = RunDirectory(tmp_path / "out").results()
    assert {str(key) for key in found} == {
        f"{task}.{sample}.0" for task in ("solved", "unsolved") for sample in range(3)
    }
    lock = json.loads((tmp_path / "out" / "lock.json").read_text())
    assert (
        lock["tasks"]["solved"]["digest"] == found[AttemptKey("solved", 0, 0)].identity.task.digest
    )
    assert lock["images"]["solved"]["agent"]


class Told(Silent):
    """Keeps what is told of attempts that take long."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def attempt_goes_on(self, key: AttemptKey, where: str, lasted_s: float) -> None:
        self.lines.append((str(key), where))


async def test_run_tells_where_an_attempt_stands_that_takes_long(
    native_async_client: AsyncSandboxClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may take minutes, and a log that says nothing looks like a standstill."""
    monkeypatch.setattr(progress, "LONG_S", 0.01)
    make_task(tmp_path / "tasks", "slow", tests__test_sh=f"#!/bin/sh\nsleep 1\n{GRADED}")
    config = RunConfig(tasks=(tmp_path / "tasks",), harness="oracle")
    told = Told()
    batch = Batch(native_async_client, config, RunDirectory(tmp_path / "out"), progress=told)
    await batch.run()

    assert ("slow.0.0", "verify") in told.lines
    assert len(told.lines) < 12


async def test_run_with_a_refused_task_and_a_failing_one_finishes_the_rest(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """One author's gpu, one verifier's crash: neither may cost the others' results."""
    write_task(tmp_path / "tasks", "refused", toml=BASE + "gpus = 1\n")
    make_task(tmp_path / "tasks", "crashing", tests__test_sh="#!/bin/sh\nexit 1\n")
    make_task(tmp_path / "tasks", "good")
    make_task(tmp_path / "tasks", "odd")
    for name in ("refused", "odd"):  # a name need not be UTF-8
        (tmp_path / "tasks" / name).rename(tmp_path / "tasks" / f"{name}\udcff")
    result = await run_batch(native_async_client, tmp_path / "tasks", tmp_path / "out")

    tasks = result.summary["tasks"]
    assert tasks["odd"]["passes"] == 1
    assert (tasks["good"]["passes"], tasks["crashing"]["mean_reward"]) == (1, None)
    assert tasks["crashing"]["failures_by_side"] == {"verifier": {"reward_missing": 1}}
    (refusal,) = result.summary["refused"].values()
    assert "gpus" in refusal
    assert not result.all_verdicts


async def test_run_of_ten_tasks_with_three_that_cannot_run_gives_seven_verdicts(
    debian_image: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One policy that cannot be enforced, one broken task.toml, one build that fails: named."""
    monkeypatch.setattr(steering, "refusal", lambda: "this kernel has no sk_lookup")
    tasks = tmp_path / "tasks"
    for number in range(7):
        make_task(tasks, f"good-{number}")
    public = BASE.replace("no-network", "public")
    write_task(tasks, "public", toml=public)
    write_task(tasks, "broken", toml="schema_version = [")
    write_task(
        tasks,
        "unbuilt",
        toml='[environment]\nnetwork_mode = "no-network"\n',
        environment__Dockerfile="FROM debian:bookworm\nRUN echo no >&2; exit 7\n",
    )
    async with AsyncSandboxClient(in_process=True, runtime="native") as client:
        result = await run_batch(client, tasks, tmp_path / "out", samples=2, concurrency=3)
        assert await client.list_sandboxes() == ()

    summary = result.summary
    assert (summary["totals"]["verdicts"], summary["totals"]["passes"]) == (14, 14)
    assert {key for key, task in summary["tasks"].items() if task["missing"] == 0} == {
        f"good-{number}" for number in range(7)
    }
    why = {Path(path).name: text for path, text in summary["refused"].items()}
    assert set(why) == {"public", "broken", "unbuilt"}
    assert "[environment] has the network public" in why["public"]
    assert "sk_lookup" in why["public"]
    assert "not TOML" in why["broken"]
    assert "Dockerfile:2" in why["unbuilt"]
    assert (summary["complete"], result.all_verdicts, exit_code(result)) == (False, False, 1)


class FlakyClient(AsyncSandboxClient):
    """Fails to create so many sandboxes, as a busy node does."""

    faults = 0

    async def create_sandbox(self, image: str, **options: Any) -> Any:  # type: ignore[override]
        if self.faults:
            self.faults -= 1
            raise CreateError("injected")
        return await super().create_sandbox(image, **options)


async def test_run_retries_a_passing_fault_as_a_new_attempt_of_the_sample(
    debian_image: object, tmp_path: Path
) -> None:
    """Fault recovery is no new sample, and does not pass for a clean run."""
    make_task(tmp_path / "tasks")
    async with FlakyClient(in_process=True, runtime="native") as client:
        client.faults = 1
        result = await run_batch(
            client, tmp_path / "tasks", tmp_path / "a", samples=2, concurrency=1
        )
        client.faults = 9
        gave_up = await run_batch(client, tmp_path / "tasks", tmp_path / "b", attempts=3)

    assert {str(key) for key in result.trajectories} == {"one.0.0", "one.0.1", "one.1.0"}
    task = result.summary["tasks"]["one"]
    assert (task["verdicts"], task["retries"], task["missing"]) == (2, 1, 0)
    assert (result.summary["complete"], result.all_verdicts) == (True, False)
    assert len(gave_up.trajectories) == 3
    sides = {one.failure and one.failure.side for one in gave_up.trajectories.values()}
    assert sides == {Side.STARTUP}


async def test_run_again_makes_only_what_has_no_result(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """A result that is there is paid for; one that is damaged is not a result."""
    make_task(tmp_path / "tasks")
    first = await run_batch(native_async_client, tmp_path / "tasks", tmp_path / "out", samples=3)
    damaged = tmp_path / "out" / "attempts" / "one.1.0" / "trajectory.json"
    damaged.write_bytes(damaged.read_bytes()[:200])

    second = await run_batch(
        native_async_client, tmp_path / "tasks", tmp_path / "out", samples=3, concurrency=7
    )

    again = {
        str(key)
        for key, one in second.trajectories.items()
        if one.identity.trace_id != first.trajectories[key].identity.trace_id
    }
    assert again == {"one.1.0"}
    assert second.run_id == first.run_id
    assert second.all_verdicts


async def test_run_again_with_anything_changed_is_refused_by_name(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """Two halves under different terms are not one run."""
    directory = make_task(tmp_path / "tasks")
    await run_batch(native_async_client, tmp_path / "tasks", tmp_path / "out")

    with pytest.raises(RunError, match=r"harness: .*oracle.* is now .*nop"):
        await run_batch(native_async_client, tmp_path / "tasks", tmp_path / "out", harness="nop")
    (directory / "instruction.md").write_text("Do something else.")
    with pytest.raises(RunError, match=r"tasks\.one\.digest"):
        await run_batch(native_async_client, tmp_path / "tasks", tmp_path / "out")


async def test_run_again_with_another_image_of_the_verifier_is_refused_by_name(
    native_async_client: AsyncSandboxClient,
    image_store: ImageStore,
    debian_image: Image,
    busybox_image: Image,
    tmp_path: Path,
) -> None:
    """Half of a run graded by one set of programs and half by another is not one run."""
    name = f"test/grader-{tmp_path.name.replace('_', '-').lower()[:40]}:1"
    with image_store.workspace() as work:
        tree = work / "tree"
        (tree / "tests").mkdir(parents=True)
        script = tree / "tests" / "test.sh"
        script.write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
        script.chmod(0o755)
        layer = image_store.add_layer(tree)
    image_store.tag(name, [*debian_image.layers, layer], debian_image.config)
    toml = BASE + '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\n'
    toml += f'docker_image = "{name}"\nnetwork_mode = "no-network"\n'
    make_task(tmp_path / "tasks", toml=toml.removeprefix(BASE))
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    try:
        first = await run_batch(native_async_client, tasks, out, samples=2)
        (out / "attempts" / "one.1.0" / "trajectory.json").unlink()
        image_store.tag(name, [*busybox_image.layers, layer], busybox_image.config)
        second = await run_batch(native_async_client, tasks, out, samples=2)
    finally:
        image_store.remove(name)

    assert first.all_verdicts
    failure = second.trajectories[AttemptKey("one", 1, 0)].failure
    assert failure and failure.side is Side.CALLER
    assert f"{name!r} of the verifier is" in failure.message


async def test_run_that_is_cancelled_deletes_its_sandboxes_and_keeps_its_results(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """Ctrl-C in the middle of a night's batch loses neither machines nor verdicts."""
    make_task(tmp_path / "tasks", "a-quick")
    make_task(tmp_path / "tasks", "b-slow", solution__solve_sh="#!/bin/sh\nsleep 1000\n")
    ended = asyncio.Event()

    class Heard(Silent):
        def attempt_ended(self, key: AttemptKey, trajectory: Trajectory, *, last: bool) -> None:
            ended.set()

    config = RunConfig(tasks=(tmp_path / "tasks",), harness="oracle", concurrency=2)
    batch = Batch(native_async_client, config, RunDirectory(tmp_path / "out"), progress=Heard())
    running = asyncio.create_task(batch.run())
    await ended.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert await native_async_client.list_sandboxes() == ()
    assert [str(key) for key in RunDirectory(tmp_path / "out").results()] == ["a-quick.0.0"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["interrupted"], summary["totals"]["missing"]) == (True, 1)


async def test_run_keeps_no_secret_anywhere_in_its_directory(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """Run directories are copied around and published."""
    key, judge = "sk-model-key-1", "judge-key-22"
    toml = '[verifier]\nenv = { JUDGE = "${JUDGE_KEY}" }\n'
    make_task(
        tmp_path / "tasks",
        toml=toml,
        tests__test_sh='#!/bin/sh\necho "$JUDGE"\necho 1 > /logs/verifier/reward.txt\n',
    )
    with ModelEndpoint({"Do one": [Bash(f"echo {key}; API_TOKEN=abcdef-1 true")]}) as endpoint:
        url = endpoint.base_url.replace("http://", "http://me:urlpass@")
        config = RunConfig(
            tasks=(tmp_path / "tasks",),
            harness="react",
            model=ModelSettings("policy", url, api_key=key),
        )
        directory = RunDirectory(tmp_path / "out")
        host = {"JUDGE_KEY": judge}
        result = await Batch(native_async_client, config, directory, host_env=host).run()

    assert result.all_verdicts
    written = b"\n".join(one.read_bytes() for one in directory.root.rglob("*") if one.is_file())
    assert [one for one in (key, judge, "urlpass") if one.encode() in written] == []
    assert b"[redacted]" in written


async def test_image_of_one_content_is_built_once_for_all_who_want_it(
    native_async_client: AsyncSandboxClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen attempts that start together must not run the Dockerfile sixteen times."""
    toml = '[environment]\nnetwork_mode = "no-network"\n'
    dockerfile = "FROM debian:bookworm\nRUN echo built > /built\n"
    tasks = [
        load_task(write_task(tmp_path, name, toml=toml, environment__Dockerfile=dockerfile))
        for name in ("a", "b")
    ]
    builds = []
    build = native_async_client.build_image

    async def counted(*args: Any, **options: Any) -> Any:
        builds.append(options["name"])
        return await build(*args, **options)

    monkeypatch.setattr(native_async_client, "build_image", counted)
    images = ImageBuilder(native_async_client)
    built = await asyncio.gather(*(images.image(task) for task in tasks * 8))

    assert len(builds) == 1
    assert {one.name for one in built} == set(builds)
    async with await native_async_client.create_sandbox(built[0].name) as sandbox:
        assert await sandbox.files.read("/built") == b"built\n"


async def test_run_with_a_bad_dockerfile_line_fails_by_file_and_line(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """The author must be told the line, not that something failed to start."""
    toml = '[environment]\nnetwork_mode = "no-network"\n'
    files = {"environment__Dockerfile": "FROM debian:bookworm\nADD https://mirror.example/x /x\n"}
    make = write_task(tmp_path / "tasks", toml=toml, tests__test_sh=GRADED, **files)
    result = await run_batch(native_async_client, tmp_path / "tasks", tmp_path / "out")

    assert result.trajectories == {}
    assert f"{make / 'environment' / 'Dockerfile'}:2" in result.summary["refused"][str(make)]


def worker_pids() -> list[int]:
    """Pids of the spawner workers that this process has started."""
    children = [
        int(pid)
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    ]
    return [pid for pid in children if "coldframe" in str(Path(f"/proc/{pid}/exe").readlink())]


async def test_run_whose_spawner_is_killed_recovers_every_sample(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """The node's death is nobody's reward: the samples are made again, and counted once."""
    slow = "#!/bin/sh\ntouch /begun; sleep 0.5; touch /done\n"
    make_task(tmp_path / "tasks", solution__solve_sh=slow)
    running = asyncio.create_task(
        run_batch(
            native_async_client, tmp_path / "tasks", tmp_path / "out", samples=4, concurrency=4
        )
    )
    await until_asked(lambda: all_begun(native_async_client, 4))
    pids = worker_pids()
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    result = await running

    task = result.summary["tasks"]["one"]
    assert (task["verdicts"], task["passes"], task["missing"]) == (4, 4, 0)
    assert task["retries"] >= 1
    assert set(task["failures_by_side"]) <= {"environment", "startup"}
    assert (result.summary["complete"], result.all_verdicts) == (True, False)


HALF = "\ud83d"
KEY = "sk-test-key-of-the-run"


def answering(message: dict[str, Any], finish_reason: str = "stop", model: str = "m") -> Http:
    choice = {"message": message, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return Http(200, json.dumps({"model": model, "choices": [choice], "usage": usage}).encode())


def calling(arguments: str = '{"command": "true"}', **changed: str) -> dict[str, Any]:
    call = tool_call(arguments, call_id=changed.get("id", "c"), name=changed.get("name", "bash"))
    return {"content": changed.get("content"), "tool_calls": [call]}


@pytest.mark.parametrize(
    "reply",
    [
        answering(calling(content=HALF)),
        answering(calling(id=HALF)),
        answering(calling(name=HALF)),
        answering(calling('{"command": "true", "\\ud83d": 1}')),
        answering({"content": "x"}, finish_reason=HALF),
        answering({"content": "x"}, model=HALF),
        Http(
            400,
            json.dumps(
                {"error": {"code": "context_length_exceeded", "message": f"{HALF} {KEY}"}}
            ).encode(),
        ),
    ],
    ids=["content", "call id", "tool", "argument", "finish reason", "model", "error"],
)
async def test_run_with_an_answer_that_was_cut_inside_of_a_character_keeps_its_verdict(
    native_async_client: AsyncSandboxClient, tmp_path: Path, reply: Http
) -> None:
    """No policy may end a run, or escape its grade, by half of a surrogate pair."""
    write_task(tmp_path / "tasks", tests__test_sh=GRADED)
    with ModelEndpoint({"Do one": [reply, Say("Done.")]}) as endpoint:
        model = ModelSettings("m", endpoint.base_url, api_key=KEY, retries=0)
        result = await run_batch(
            *(native_async_client, tmp_path / "tasks", tmp_path / "out"),
            harness="react",
            model=model,
        )

    (trajectory,) = result.trajectories.values()
    assert trajectory.rewards == {"reward": 0.0}, trajectory.failure
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
