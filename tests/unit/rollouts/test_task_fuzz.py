"""Whatever stands in a task.toml, reading it ends in a task or in a refusal that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldframe.protocol.errors import TaskError
from coldframe.rollouts.load import load_task
from tests.unit.rollouts.tasks import write_files

WORDS = """schema_version version source artifacts multi_step_reward_strategy steps task metadata
    agent verifier environment solution coldframe name description authors keywords timeout_sec user
    network_mode allowed_hosts env environment_mode collect command service build_timeout_sec
    docker_image os cpus memory_mb storage_mb memory storage gpus gpu_types tpu mcp_servers
    skills_dir healthcheck workdir allow_internet interval_sec start_period_sec start_interval_sec
    retries transport url args headers destination exclude min_reward full_kill pass_threshold
    key_inputs unknown"""
FIELDS = WORDS.split()
TEXTS = ["", "a", "/srv", "../x", "allowlist", "public", "separate", "mean", "1.4", "stdio", "2G"]
plain = st.one_of(
    st.sampled_from(TEXTS),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=5),
    st.integers(-3, 3),
    st.sampled_from([0.5, float("nan"), float("inf"), 1e300]),
    st.booleans(),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    ),
    max_leaves=12,
)
documents = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


def toml(value: Any) -> str:
    """Write a value inline, as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"instruction.md": "Do.", "tests/test.sh": "x", "environment/Dockerfile": "FROM a"}
    return write_files(tmp_path_factory.mktemp("tasks") / "one", files)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=documents)
def test_task_of_any_content_is_loaded_or_refused_by_its_file(
    directory: Path, document: dict[str, Any]
) -> None:
    """A crash of the reader would take the whole batch with it."""
    text = "".join(f"{name} = {toml(value)}\n" for name, value in document.items())
    (directory / "task.toml").write_text(text)
    try:
        task = load_task(directory)
    except TaskError as error:
        assert str(directory) in str(error)
    else:
        assert task.steps
