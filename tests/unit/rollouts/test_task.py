"""A field that is silently ignored changes what a task measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.harnesses import load_harness
from coldframe.harnesses.base import McpServer
from coldframe.protocol.errors import TaskError
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts.artifacts import Artifact
from coldframe.rollouts.layout import strip_canary
from coldframe.rollouts.load import find_tasks, load_batch, load_task
from coldframe.rollouts.task import CollectHook, Healthcheck
from tests.unit.rollouts.tasks import BASE, write_task

FULL = """
version = "1.0"
source = "made-up"
multi_step_reward_strategy = "final"
artifacts = ["/srv/out", { source = "/srv/log", destination = "log", exclude = ["*.tmp"] }]
[task]
name = "org/full"
version = "3"
description = "All that is honoured."
authors = [{ name = "nobody" }]
keywords = ["a"]
[metadata]
anything = { goes = 1 }
[metadata.coldframe]
full_kill = true
start_cmd = true
pass_threshold = 0.5
[agent]
timeout_sec = 12
user = "agent"
network_mode = "no-network"
[verifier]
timeout_sec = 3.5
user = 1000
environment_mode = "shared"
env = { LEVEL = "${LEVEL:-2}", FROM = "${FROM_HOST}" }
network_mode = "allowlist"
allowed_hosts = ["A.Example.", "*.b.example", "192.0.2.7", "198.51.100.0/24", "2001:db8::1"]
[[verifier.collect]]
command = "dump > /srv/out"
timeout_sec = 7
user = 0
[environment]
build_timeout_sec = 30
docker_image = "debian:bookworm"
cpus = 2
memory = "2G"
storage_mb = 100
workdir = "/srv"
allow_internet = false
gpus = 0
gpu_types = []
os = "linux"
env = { A = "1" }
skills_dir = "/skills"
[environment.healthcheck]
command = "test -e /ready"
interval_sec = 0
timeout_sec = 2
start_period_sec = 3.5
start_interval_sec = 0.5
retries = 4
[[environment.mcp_servers]]
name = "tools"
transport = "http"
url = "http://127.0.0.1:9/mcp"
headers = { Authorization = "Bearer ${FROM_HOST}" }
[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "serve"
args = ["--all"]
[solution]
env = { B = "2" }
"""


def test_task_with_every_honoured_field_loads_their_values(tmp_path: Path) -> None:
    """The control of all refusals: these fields are read, older spellings too."""
    task = load_task(write_task(tmp_path, toml=FULL), {"FROM_HOST": "secret-value"})

    step, environment = task.steps[0], task.environment
    assert (task.name, task.source, task.schema_version) == ("org/full", "made-up", "1.0")
    assert (task.multi_step, step.name, task.reward_strategy) == (False, None, "final")
    assert (step.agent.timeout_s, step.agent.user) == (12.0, "agent")
    assert (step.agent.network_mode, step.agent.network) == ("no-network", NetworkPolicy())
    verifier = step.verifier
    assert (verifier.timeout_s, verifier.user, verifier.separate) == (3.5, 1000, False)
    assert verifier.env == {"LEVEL": "2", "FROM": "secret-value"}
    assert verifier.network == NetworkPolicy.parse(
        "a.example", "*.b.example", "192.0.2.7", "198.51.100.0/24", "2001:db8::1"
    )
    assert verifier.collect == (CollectHook("dump > /srv/out", 7.0, 0),)
    assert verifier.script == task.directory / "tests" / "test.sh"
    assert step.artifacts == (
        Artifact("/logs/artifacts"),
        Artifact("/srv/out"),
        Artifact("/srv/log", "log", ("*.tmp",)),
    )
    assert task.solution_env == {"B": "2"}
    assert (task.full_kill, task.start_cmd, task.pass_threshold) == (True, True, 0.5)
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (2.0, 2048, 100)
    assert (environment.workdir, environment.env) == ("/srv", {"A": "1"})
    assert (environment.network_declared, environment.network.empty) == ("no-network", True)
    assert environment.healthcheck == Healthcheck("test -e /ready", 0.0, 2.0, 3.5, 0.5, 4)
    assert environment.skills_dir == "/skills"
    assert environment.mcp_servers == (
        McpServer(
            "tools",
            "streamable-http",
            url="http://127.0.0.1:9/mcp",
            headers={"Authorization": "Bearer secret-value"},
        ),
        McpServer("files", "stdio", command="serve", args=("--all",)),
    )
    assert task.metadata == {"anything": {"goes": 1}}
    assert task.secrets == {"secret-value"}


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_task_of_any_version_that_is_honoured_says_which(tmp_path: Path, version: str) -> None:
    """Public tasks are of several; the record of an attempt must tell them apart."""
    toml = BASE.replace("1.3", version)
    assert load_task(write_task(tmp_path, toml=toml)).schema_version == version


@pytest.mark.parametrize(
    ("toml", "name"),
    [
        ('unheard_of = "1"', "unheard_of"),
        (
            "[enviroment]\ncpus = 1",
            "enviroment is not a field that is known here; the nearest is environment",
        ),
        ('schema_version = "9.9"', "schema_version"),
        ('multi_step_reward_strategy = "best"', "multi_step_reward_strategy"),
        (
            "[task]\nauthor = 'nobody'",
            "[task] author is not a field that is known here; the nearest is authors",
        ),
        (
            "[agent]\ntimeout = 3",
            "[agent] timeout is not a field that is known here; the nearest is timeout_sec",
        ),
        ("[agent]\ntimeout_sec = 0", "[agent] timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "[agent] timeout_sec"),
        ('[agent]\nnetwork_mode = "private"', "[agent] network_mode"),
        ('[agent]\nallowed_hosts = ["a.example"]', "[agent] allowed_hosts"),
        ("[agent]\nuser = -1", "[agent] user"),
        ('[verifier]\nenvironment_mode = "apart"', "[verifier] environment_mode"),
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1',
            "[verifier] environment_mode",
        ),
        ("[verifier.environment]\nmemory_gb = 1", "[verifier.environment] memory_gb"),
        ('[verifier.environment]\nskills_dir = "/s"', "[verifier.environment] skills_dir"),
        ("[verifier]\ncollect = [{ path = '/x' }]", "[verifier.collect.1] path"),
        ("[[verifier.collect]]\ncommand = 'a'\nservice = 'db'", "[verifier.collect.1] service"),
        ("[[verifier.collect]]\nuser = 'a'", "[verifier.collect.1] command"),
        ("[verifier]\nenv = { A = 1 }", "[verifier] env.A"),
        ('[verifier]\nenv = { A = "${NOT_SET_HERE}" }', "NOT_SET_HERE"),
        ('artifacts = ["srv"]', "[artifacts.1] source"),
        ('artifacts = ["/srv/../etc"]', "[artifacts.1] source"),
        ("artifacts = ['/a', 3]", "artifacts"),
        ("artifacts = [{ destination = 'a' }]", "[artifacts.1] source"),
        ("artifacts = [{ source = '/a', destination = '../b' }]", "[artifacts.1] destination"),
        ("artifacts = [{ source = '/a', destination = '/b' }]", "[artifacts.1] destination"),
        (
            "artifacts = [{ source = '/a', destination = 'manifest.json' }]",
            "[artifacts.1] destination",
        ),
        ("artifacts = [{ source = '/a', service = 'db' }]", "[artifacts.1] service"),
        (
            "artifacts = [{ source = '/a', excludes = ['b'] }]",
            "[artifacts.1] excludes is not a field that is known here; the nearest is exclude",
        ),
        ("artifacts = ['/a/b', { source = '/c', destination = 'a' }]", "artifacts would put"),
        ("[environment]\ngpus = 1", "[environment] gpus"),
        ("[environment]\ngpus = false", "[environment] gpus"),
        ('[environment]\ngpu_types = ["T4"]', "[environment] gpu_types"),
        ('[environment]\ntpu = { type = "v5", topology = "2x4" }', "[environment] tpu"),
        ('[environment]\nos = "windows"', "[environment] os"),
        ('[environment]\nmcp_servers = [{ name = "a" }]', "[environment.mcp_servers.a] url"),
        (
            '[environment]\nmcp_servers = [{ name = "a", transport = "stdio" }]',
            "[environment.mcp_servers.a] command",
        ),
        (
            '[environment]\nmcp_servers = [{ name = "a", transport = "smoke" }]',
            "[environment.mcp_servers.a] transport",
        ),
        ('[environment]\nskills_dir = "skills"', "[environment] skills_dir"),
        (
            '[environment]\nhealthcheck = { command = "true", interval = 3 }',
            "[environment.healthcheck] interval is not a field that is known here; "
            "the nearest is interval_sec",
        ),
        ("[environment]\nhealthcheck = { retries = 3 }", "[environment.healthcheck] command"),
        (
            '[environment]\nhealthcheck = { command = "true", retries = 0 }',
            "[environment.healthcheck] retries",
        ),
        (
            '[environment]\nhealthcheck = { command = "true", timeout_sec = 0 }',
            "[environment.healthcheck] timeout_sec",
        ),
        (
            '[environment]\nhealthcheck = { command = "true", interval_sec = -1 }',
            "[environment.healthcheck] interval_sec",
        ),
        ('[environment]\nnetwork_mode = "none"', "[environment] network_mode"),
        ('[environment]\nallowed_hosts = ["a.example"]', "[environment] allowed_hosts"),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["http://a.example"]',
            "'http://a.example'",
        ),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example:443"]',
            "'a.example:443'",
        ),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.*.example"]',
            "'a.*.example'",
        ),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["10.0.0.1/8"]',
            "'10.0.0.1/8'",
        ),
        (
            '[environment]\nnetwork_mode = "public"\nallow_internet = false',
            "[environment] allow_internet",
        ),
        ('[environment]\nmemory = "lots"', "[environment] memory"),
        ("[environment]\ncpus = true", "[environment] cpus"),
        ('[environment]\nworkdir = "srv"', "[environment] workdir"),
        (
            "[metadata.coldframe]\nfull_kil = true",
            "full_kil is not a field that is known here; the nearest is full_kill",
        ),
        ("[metadata.coldframe]\nfull_kill = 1", "full_kill"),
        ("metadata = 3", "metadata"),
        ("verifier = 3", "verifier"),
    ],
)
def test_task_with_a_field_that_is_not_honoured_is_refused_by_name(
    tmp_path: Path, toml: str, name: str
) -> None:
    """The author must learn which line to change; running anyway would measure another task."""
    if "[environment]" in toml:
        toml = toml.replace("[environment]", '[environment]\ndocker_image = "a"')
    else:
        toml += '\n[environment]\ndocker_image = "a"'
    directory = write_task(tmp_path, toml=toml)

    with pytest.raises(TaskError) as caught:
        load_task(directory)

    assert name in str(caught.value)
    assert str(directory / "task.toml") in str(caught.value)


def test_task_with_two_faults_names_both(tmp_path: Path) -> None:
    """One fault per run of the command would be a guessing game."""
    toml = BASE + "gpus = 2\n[agent]\nmood = 'good'\n"

    with pytest.raises(TaskError, match=r"gpus.*mood|mood.*gpus"):
        load_task(write_task(tmp_path, toml=toml))


@pytest.mark.parametrize(
    ("declared", "mode", "policy"),
    [
        ("", None, NetworkPolicy(public=True)),
        ('network_mode = "public"', "public", NetworkPolicy(public=True)),
        ("allow_internet = true", "public", NetworkPolicy(public=True)),
        ("allow_internet = false", "no-network", NetworkPolicy()),
        ('network_mode = "no-network"', "no-network", NetworkPolicy()),
        ('network_mode = "allowlist"', "allowlist", NetworkPolicy()),
        ('network_mode = "allowlist"\nallowed_hosts = []', "allowlist", NetworkPolicy()),
    ],
)
def test_task_network_mode_becomes_the_policy_of_all_its_phases(
    tmp_path: Path, declared: str, mode: str | None, policy: NetworkPolicy
) -> None:
    """A task that says nothing is public, as the format has it, and the record can tell."""
    task = load_task(write_task(tmp_path, toml=f'[environment]\ndocker_image = "a"\n{declared}'))

    assert (task.environment.network_declared, task.environment.network) == (mode, policy)
    assert (task.steps[0].agent.network, task.steps[0].verifier.network) == (policy, policy)
    assert task.steps[0].agent.network_mode == (mode or "public")


@pytest.mark.parametrize("phase", ["agent", "verifier"])
def test_task_phase_with_a_network_of_its_own_overrides_the_baseline_alone(
    tmp_path: Path, phase: str
) -> None:
    """An agent without network and a verifier with it are two policies, not one."""
    step = load_task(
        write_task(tmp_path, toml=f'{BASE}\n[{phase}]\nnetwork_mode = "public"')
    ).steps[0]

    policies = {"agent": step.agent.network, "verifier": step.verifier.network}
    assert policies.pop(phase).public
    assert next(iter(policies.values())).empty


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("environment/docker-compose.yaml", "x", "docker-compose.yaml"),
        ("tests/compose.yaml", "x", "compose.yaml"),
        ("steps/a/instruction.md", "x", "steps"),
        ("trajectory.json", "{}", "trajectory.json"),
        ("wrong/a/note", "x", "wrong/a/solve.sh"),
        ("instruction.md", "<!-- canary -->\n \n", "instruction.md"),
        ("instruction.md", "x" * 200_001, "at most 200000"),
    ],
)
def test_task_with_a_file_that_is_not_honoured_is_refused_by_name(
    tmp_path: Path, path: str, text: str, name: str
) -> None:
    """What stands in the directory asks for something as much as a field does."""
    directory = write_task(tmp_path)
    (directory / path).parent.mkdir(parents=True, exist_ok=True)
    (directory / path).write_text(text)

    with pytest.raises(TaskError, match=name):
        load_task(directory)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_task_without_a_needed_file_is_refused_by_its_name(tmp_path: Path, missing: str) -> None:
    """A task without a verifier would fail everybody, after paying for the rollout."""
    directory = write_task(tmp_path)
    (directory / missing).unlink()

    with pytest.raises(TaskError, match=missing):
        load_task(directory)


def test_task_that_is_not_toml_is_refused_by_line(tmp_path: Path) -> None:
    """A syntax error is found by its line, not by reading the file."""
    with pytest.raises(TaskError, match=r"task\.toml: not TOML: .*line 2"):
        load_task(write_task(tmp_path, toml="a = 1\nb = = 2\n"))


def test_batch_with_a_refused_task_keeps_the_others(tmp_path: Path) -> None:
    """One author's unsupported field must not cost everybody else's night."""
    write_task(tmp_path, "good")
    bad = write_task(tmp_path, "bad", toml=BASE + "gpus = 1\n")

    loaded = load_batch([tmp_path], {})

    assert [task.key for task in loaded.tasks] == ["good"]
    assert list(loaded.refused) == [str(bad)]
    assert "gpus" in loaded.refused[str(bad)]


def test_batch_with_two_tasks_of_one_name_refuses_the_second(tmp_path: Path) -> None:
    """Their attempts would share a directory and overwrite each other."""
    first = write_task(tmp_path / "a", "same")
    second = write_task(tmp_path / "b", "same")

    loaded = load_batch([first, second, first], {})

    assert [task.directory for task in loaded.tasks] == [first]
    assert list(loaded.refused) == [str(second)]


def test_find_tasks_where_there_are_none_names_the_path(tmp_path: Path) -> None:
    """A mistyped path must not look like an empty, successful batch."""
    (tmp_path / "notes.md").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "notes.md"):
        with pytest.raises(TaskError, match=str(path)):
            find_tasks([path])


def test_what_a_shell_makes_of_the_examples_are_their_tasks() -> None:
    """`examples/tasks/*` names the files beside the tasks as well; the demo asks for just that."""
    examples = Path(__file__).parents[3] / "examples" / "tasks"
    beside = [one for one in examples.iterdir() if one.is_file()]

    assert beside
    assert find_tasks(sorted(examples.iterdir())) == find_tasks([examples])


def test_digest_of_a_task_changes_with_what_is_run_only(tmp_path: Path) -> None:
    """A resumed run refuses a changed task; adding a wrong solution changes no result."""
    directory = write_task(tmp_path)
    before = load_task(directory).digest
    (directory / "wrong" / "a").mkdir(parents=True)
    (directory / "wrong" / "a" / "solve.sh").write_text("true")
    (directory / "tests" / "__pycache__").mkdir()
    same = load_task(directory)
    (directory / "tests" / "test.sh").chmod(0o755)
    mode = load_task(directory).digest
    (directory / "tests" / "data").symlink_to("test.sh")
    link = load_task(directory).digest

    assert (same.digest, same.wrong) == (before, ("a",))
    assert len({before, mode, link}) == 3


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("<!-- canary GUID 1 -->\n# Canary two\n\nDo it.\n", "Do it.\n"),
        ("Do it.\n<!-- canary -->\n", "Do it.\n<!-- canary -->\n"),
        ("# Title\nDo it.", "# Title\nDo it."),
    ],
)
def test_canary_lines_are_stripped_only_where_they_lead(text: str, stripped: str) -> None:
    """A policy that sees canaries learns to expect them; the rest of the text is the task."""
    assert strip_canary(text) == stripped


def test_batch_refuses_a_task_whose_offers_the_harness_cannot_pass_on(tmp_path: Path) -> None:
    """Found before a sandbox is made; the reference, which shows nobody anything, runs it."""
    toml = BASE + '[[environment.mcp_servers]]\nname = "tools"\nurl = "http://127.0.0.1:1"\n'
    directory = write_task(tmp_path, toml=toml)

    refused = load_batch([directory], {}, load_harness("react")).refused[str(directory)]

    assert "MCP servers (tools)" in refused and "'react'" in refused
    assert load_batch([directory], {}, load_harness("oracle")).refused == {}
