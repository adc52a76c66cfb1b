"""A field that is silently ignored changes what a task measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.protocol.errors import TaskError
from coldframe.rollouts.run import load_batch
from coldframe.rollouts.task import find_tasks, load_task, strip_canary
from tests.unit.rollouts.tasks import BASE, write_task

FULL = """
version = "1.0"
source = "made-up"
[task]
name = "org/full"
description = "All that is honoured."
authors = [{ name = "nobody" }]
keywords = ["a"]
[metadata]
anything = { goes = 1 }
[metadata.coldframe]
full_kill = true
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
mcp_servers = []
os = "linux"
env = { A = "1" }
[solution]
env = { B = "2" }
"""


def test_task_with_every_honoured_field_loads_their_values(tmp_path: Path) -> None:
    """The control of all refusals: these fields are read, older spellings too."""
    task = load_task(write_task(tmp_path, toml=FULL), {"FROM_HOST": "secret-value"})

    assert (task.name, task.source, task.schema_version) == ("org/full", "made-up", "1.0")
    assert (task.agent_timeout_s, task.agent_user) == (12.0, "agent")
    assert (task.verifier_timeout_s, task.verifier_user) == (3.5, 1000)
    assert task.verifier_env == {"LEVEL": "2", "FROM": "secret-value"}
    assert task.solution_env == {"B": "2"}
    assert (task.full_kill, task.pass_threshold) == (True, 0.5)
    environment = task.environment
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (2.0, 2048, 100)
    assert (environment.workdir, environment.env) == ("/srv", {"A": "1"})
    assert environment.network_declared == "no-network"
    assert task.metadata == {"anything": {"goes": 1}}
    assert task.secrets == {"secret-value"}


@pytest.mark.parametrize(
    ("toml", "name"),
    [
        ('artifacts = ["/logs"]', "artifacts"),
        ('unheard_of = "1"', "unheard_of"),
        ('schema_version = "9.9"', "schema_version"),
        ("[[steps]]\nname = 'a'", "steps"),
        ("[agent]\ntimeout = 3", "[agent] timeout"),
        ("[agent]\ntimeout_sec = 0", "[agent] timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "[agent] timeout_sec"),
        ('[agent]\nnetwork_mode = "public"', "[agent] network_mode"),
        ("[agent]\nuser = -1", "[agent] user"),
        ('[verifier]\nnetwork_mode = "allowlist"', "[verifier] network_mode"),
        ('[verifier]\nenvironment_mode = "separate"', "[verifier] environment_mode"),
        ('[verifier]\n[verifier.environment]\ndocker_image = "x"', "[verifier] environment"),
        ('[verifier]\ncollect = [{ path = "/x" }]', "[verifier] collect"),
        ("[verifier]\nenv = { A = 1 }", "[verifier] env.A"),
        ('[verifier]\nenv = { A = "${NOT_SET_HERE}" }', "NOT_SET_HERE"),
        ("[environment]\ngpus = 1", "[environment] gpus"),
        ("[environment]\ngpus = false", "[environment] gpus"),
        ('[environment]\ngpu_types = ["T4"]', "[environment] gpu_types"),
        ('[environment]\ntpu = "v5"', "[environment] tpu"),
        ('[environment]\nos = "windows"', "[environment] os"),
        ('[environment]\nmcp_servers = [{ name = "a" }]', "[environment] mcp_servers"),
        ('[environment]\nskills_dir = "/skills"', "[environment] skills_dir"),
        ('[environment]\nhealthcheck = { command = "true" }', "[environment] healthcheck"),
        ('[environment]\nnetwork_mode = "public"', "[environment] network_mode"),
        ('[environment]\nnetwork_mode = "allowlist"', "[environment] network_mode"),
        ('[environment]\nallowed_hosts = ["a.example"]', "[environment] allowed_hosts"),
        ("[environment]\nallow_internet = true", "[environment] allow_internet"),
        ('[environment]\nmemory = "lots"', "[environment] memory"),
        ("[environment]\ncpus = true", "[environment] cpus"),
        ('[environment]\nworkdir = "srv"', "[environment] workdir"),
        ("[metadata.coldframe]\nfull_kil = true", "full_kil"),
        ("[metadata.coldframe]\nfull_kill = 1", "full_kill"),
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


def test_task_that_declares_no_network_mode_is_loaded_and_says_so(tmp_path: Path) -> None:
    """Most published tasks say nothing; they run without network and the record tells."""
    toml = '[environment]\ndocker_image = "debian:bookworm"\n'

    assert load_task(write_task(tmp_path, toml=toml)).environment.network_declared is None


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("environment/docker-compose.yaml", "x", "docker-compose.yaml"),
        ("steps/a/instruction.md", "x", "steps"),
        ("instruction.md", "<!-- canary -->\n \n", "instruction.md"),
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
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(TaskError, match=str(path)):
            find_tasks([path])


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

    assert (same.digest, list(same.wrong)) == (before, ["a"])
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
