"""What grades an agent is nowhere that the agent can look, in no phase of its own.

The agent searches every file system, the memory and the tables of every process that it can see,
for words that stand only in tests, solutions and the verifier's environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.harnesses.base import ModelSettings
from coldframe.images.store import ImageStore
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import BlobStore
from tests.doubles.model_endpoint import Bash, ModelEndpoint, Say
from tests.integration.rollouts.conftest import RunAttempt, run_attempt  # noqa: F401 (a fixture)
from tests.integration.rollouts.test_steps import steps_task
from tests.unit.rollouts.tasks import write_task

pytestmark = pytest.mark.root
REWARD = "/logs/verifier/reward.txt"

# The pattern does not match itself, so that the search does not find its own text.
SEARCH = r"""
import json, os, re, stat, sys
word = re.compile(rb"c[a]nary-[a-z]+")
found, looked = {}, 0
def note(place, data):
    for match in word.findall(data):
        found.setdefault(match.decode(), set()).add(place)
def read(path, most=4 << 20):
    global looked
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        left = most
        while left > 0:
            try:
                data = os.read(fd, min(left, 1 << 20))
            except OSError:
                break
            if not data:
                break
            note(path, data)
            left -= len(data)
        looked += 1
    finally:
        os.close(fd)
def memory(pid):
    try:
        maps = open(f"/proc/{pid}/maps").read().splitlines()
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return
    for line in maps:
        first, last = (int(one, 16) for one in line.split()[0].split("-"))
        try:
            note(f"memory of {pid}", os.pread(fd, min(last - first, 4 << 20), first))
        except (OSError, OverflowError):
            pass
for root, names, files in os.walk("/"):
    names[:] = [one for one in names if (root, one) not in {("/", "sys")}]
    if root.count("/") > 3 and root.startswith("/proc"):
        names[:] = []
    for name in [*names, *files]:
        path = os.path.join(root, name)
        note(f"name of {path}", os.fsencode(name))
        try:
            kind = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISLNK(kind.st_mode):
            try:
                note(f"link {path}", os.fsencode(os.readlink(path)))
            except OSError:
                pass
        elif stat.S_ISREG(kind.st_mode):
            read(path)
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != os.getpid():
        memory(pid)
for path in sys.argv[1:]:
    if os.path.lexists(path):
        found.setdefault("host path", set()).add(path)
print(json.dumps({"looked": looked, "found": {k: sorted(v) for k, v in found.items()}}))
"""


def search(*host_paths: object) -> Bash:
    words = " ".join(f"'{path}'" for path in host_paths)
    return Bash(f"cat > /root/look.py <<'END'\n{SEARCH}\nEND\npython3 /root/look.py {words}")


def answers(trajectory: Trajectory, blobs: Path) -> list[dict[str, object]]:
    """Return what each search of the agent printed."""
    texts = [
        BlobStore(blobs).get(call.stdout.stored)
        for step in trajectory.steps
        for call in step.calls
        if call.stdout is not None
    ]
    return [json.loads(text) for text in texts if text.startswith(b"{")]


FILES = {
    "tests__test_sh": f"#!/bin/sh\n# canary-script\necho $WORD; echo 0 > {REWARD}\n",
    "tests__canary-name": "canary-data",
    "solution__solve_sh": "#!/bin/sh\n# canary-solution\ntrue\n",
    "wrong__lazy__solve_sh": "#!/bin/sh\n# canary-wrong\ntrue\n",
}
TOML = (
    '[environment]\nnetwork_mode = "no-network"\n'
    '[verifier]\nenv = { WORD = "canary-verifier" }\n'
    '[solution]\nenv = { WORD = "canary-env" }\n'
)


async def test_agent_finds_tests_solution_and_reward_nowhere(
    run_attempt: RunAttempt,  # noqa: F811
    native_async_client: AsyncSandboxClient,
    image_store: ImageStore,
    tmp_path: Path,
) -> None:
    """As root, in every file, link, process table and memory, and in its image's layers."""
    directory = write_task(
        tmp_path,
        toml=TOML,
        environment__Dockerfile="FROM debian:bookworm\nCOPY . /app\n",
        environment__part="part",
        **FILES,
    )
    plant = "mkdir /planted; echo canary-planted > /planted/file; ln -s canary-link /planted/link"
    places = (directory, directory / "tests", image_store.layers_directory, "/tests", "/solution")
    script = [
        search(*places, "/logs/verifier"),
        Bash(f"{plant}; X=canary-hidden sleep 1000 canary-none > /dev/null 2>&1 & exit 0"),
        Bash("X=canary-environ setsid sh -c ': canary-line; sleep 1000' > /dev/null 2>&1 & true"),
        search(),
        Say("done"),
    ]
    with ModelEndpoint({"Do one": script}) as endpoint:
        model = ModelSettings("policy", endpoint.base_url)
        trajectory = await run_attempt(directory, "react", model=model)

    assert trajectory.failure is None, trajectory.failure
    first, control = answers(trajectory, tmp_path / "blobs")
    assert first["found"] == {}
    assert int(str(first["looked"])) > 3000
    found = control["found"]
    assert isinstance(found, dict)
    assert {"canary-planted", "canary-link", "canary-environ", "canary-line"} <= set(found)
    assert any(place.endswith("/environ") for place in found["canary-environ"])
    image = trajectory.identity.image
    assert image is not None
    for layer in image.layers:
        top = image_store.layers_directory / layer.removeprefix("sha256:")
        names = [path.name for path in top.rglob("*")]
        assert names, layer
        assert not {"test.sh", "solve.sh"} & set(names)


async def test_agent_of_a_later_step_finds_nothing_of_the_verdict_before(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Between two steps the tests were in the sandbox: on disk, in memory, in its page cache."""
    directory = steps_task(
        tmp_path,
        one={
            "tests/test.sh": f"#!/bin/sh\n# canary-script\necho 1 > {REWARD}\n"
            "echo canary-reward >> /logs/verifier/log; sleep 1000 &\n",
            "tests/canary-name/data": "canary-data",
        },
        two={"tests/test.sh": f"#!/bin/sh\n# canary-later\necho 1 > {REWARD}\n"},
    )
    hold = Bash(
        "python3 - <<'END' > /dev/null 2>&1 &\nimport os, time\nwhile True:\n"
        "    os.path.exists('/tests') and time.sleep(0.01)\n    time.sleep(0.01)\nEND\ntrue"
    )
    script = {
        "Do one": [hold, Say("done")],
        "Do two": [search("/tests", "/logs/verifier", directory), Say("done")],
    }
    with ModelEndpoint(script) as endpoint:
        model = ModelSettings("policy", endpoint.base_url)
        trajectory = await run_attempt(directory, "react", model=model)

    assert trajectory.failure is None, trajectory.failure
    assert trajectory.rewards == {"reward": 1.0}
    (answer,) = answers(trajectory, tmp_path / "blobs")
    assert answer["found"] == {}


async def test_tests_are_closed_to_what_an_unprivileged_agent_left_running(
    run_attempt: RunAttempt,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A server that may read the tests while they run answers them from the answer sheet."""
    spy = (
        "import os, time\nseen = 'closed'\nfor _ in range(3000):\n    try:\n"
        "        seen = open('/tests/canary').read()\n        break\n"
        "    except FileNotFoundError:\n        time.sleep(0.001)\n"
        "    except PermissionError:\n        seen = 'refused'\n        break\n"
        "open('/tmp/seen', 'w').write(seen)\n"
    )
    directory = write_task(
        tmp_path,
        toml=TOML.replace("[environment]\n", '[environment]\ndocker_image = "debian:bookworm"\n')
        + '[agent]\nuser = "nobody"\n',
        solution__solve_sh=f"#!/bin/sh\ncat > /tmp/spy.py <<'END'\n{spy}END\n"
        "python3 /tmp/spy.py > /dev/null 2>&1 &\n",
        tests__canary="canary-data",
        tests__test_sh="#!/bin/sh\nfor i in $(seq 300); do [ -s /tmp/seen ] && break; sleep 0.01; "
        f'done\n[ "$(cat /tmp/seen)" = refused ] && echo 1 > {REWARD}\n',
    )
    trajectory = await run_attempt(directory)

    assert trajectory.rewards == {"reward": 1.0}, trajectory.failure
