"""Tasks with one trap each, and what both roads must make of it.

The agent is the oracle: what an agent would do stands in solve.sh. All start from the image
debian:bookworm unless they bring a Dockerfile. A hundredth-second task tests what a minute's would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BASE = """\
schema_version = "1.3"
{root}
[task]
name = "traps/{name}"
[agent]
timeout_sec = {agent_s}
{agent}
[verifier]
timeout_sec = {verifier_s}
{verifier}
[environment]
network_mode = "no-network"
memory_mb = {memory_mb}
{environment}
"""
IMAGE = 'docker_image = "debian:bookworm"'
REWARD = "/logs/verifier/reward"


@dataclass(frozen=True)
class Trap:
    """One task, and its outcome: a reward, or the code of a failure."""

    solve: str
    test: str
    outcome: float | str
    agent: str = ""
    agent_s: float = 60.0
    verifier: str = ""
    verifier_s: float = 60.0
    memory_mb: int = 512
    environment: str = IMAGE
    root: str = ""
    steps: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: Path, name: str) -> Path:
        """Write the task's directory and return it."""
        task = directory / name
        files = {
            "task.toml": BASE.format(name=name, **vars(self)) + self.steps,
            "instruction.md": "Do it.\n",
            "environment/.keep": "",
            "tests/test.sh": f"#!/bin/bash\n{self.test}\n",
            "solution/solve.sh": f"#!/bin/bash\n{self.solve}\n",
            **self.files,
        }
        for path, text in files.items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
            if path.endswith(".sh"):
                (task / path).chmod(0o755)
        return task


def _says(reward: str, name: str = "txt") -> str:
    return f"echo '{reward}' > {REWARD}.{name}"


def _written(reward: str, outcome: float | str, name: str = "txt") -> Trap:
    return Trap("true", _says(reward, name), outcome)


def _planted(solve: str, outcome: float | str = 0.0, test: str = "") -> Trap:
    return Trap(f"mkdir -p /logs/verifier\n{solve}", test or _says("0"), outcome)


def _step(name: str, reward: float, *, minimum: float | None = None) -> tuple[str, dict[str, str]]:
    toml = f'\n[[steps]]\nname = "{name}"\n'
    toml += f"min_reward = {minimum}\n" if minimum is not None else ""
    return toml, {
        f"steps/{name}/instruction.md": "Do it.\n",
        f"steps/{name}/solution/solve.sh": (
            '#!/bin/bash\n[ -z "$(find /tests /logs/verifier -mindepth 1 2>/dev/null)" ] '
            f"&& echo {name} > /srv/{name}\n"
        ),
        f"steps/{name}/tests/test.sh": (
            # What tests have closed must not keep the next agent from its own logs.
            f"#!/bin/bash\nchmod 700 /logs\n"
            f"grep -q {name} /srv/{name} && echo {reward} > {REWARD}.txt\n"
        ),
    }


def _steps(*steps: tuple[str, dict[str, str]], outcome: float, strategy: str) -> Trap:
    files = {path: text for _, given in steps for path, text in given.items()}
    files["environment/Dockerfile"] = "FROM debian:bookworm\nRUN chmod 777 /srv\n"
    return Trap(
        "true",
        "true",
        outcome,
        agent='user = "nobody"',
        environment="",
        root=f'multi_step_reward_strategy = "{strategy}"',
        steps="".join(toml for toml, _ in steps),
        files=files,
    )


DAEMON = """\
#!/bin/sh
setsid sh -c 'while :; do date +%s > /run/beat; sleep 0.1; done' >/dev/null 2>&1 </dev/null &
"""
ARRIVED = """\
[ "$(stat -c %s /srv/disk.img)" = 67108868 ] && [ "$(tail -c 4 /srv/disk.img)" = tail ] \\
  && [ "$(stat -c %a /srv/tool)" = 750 ] && [ "$(readlink /srv/link)" = tool ] \\
  && [ ! -e /srv/out ] && [ ! -p /srv/pipe ] && [ ! -e /root/left ]
"""

TRAPS: dict[str, Trap] = {
    # Rewards of every kind that a verifier may write.
    "writes-a-number": _written("0.5", 0.5),
    "writes-a-map": _written('{"reward": 1, "speed": 0.25}', 1.0, "json"),
    "writes-nan": _written("nan", "reward_invalid"),
    "writes-inf-json": _written('{"reward": Infinity}', "reward_invalid", "json"),
    "writes-a-bool": _written('{"reward": true}', "reward_invalid", "json"),
    "writes-a-text": _written('{"reward": "0.5"}', "reward_invalid", "json"),
    "writes-a-nesting": _written('{"reward": {"a": 1}}', "reward_invalid", "json"),
    "writes-a-word": _written("abc", "reward_invalid"),
    "writes-nothing-in-it": Trap("true", f": > {REWARD}.txt", "reward_invalid"),
    "writes-none": Trap("true", "exit 0", "reward_missing"),
    # Rewards that the agent plants.
    "plants-json": _planted(_says('{"reward": 1}', "json")),
    "plants-and-the-tests-crash": _planted(_says("1"), "reward_missing", "exit 1"),
    "plants-again-and-again": _planted(
        f"setsid bash -c 'while :; do {_says('1', 'json').replace(chr(39), '')}; done' "
        ">/dev/null 2>&1 </dev/null &"
    ),
    "plants-a-link": _planted("rm -rf /logs/verifier; mkdir /srv/w; ln -s /srv/w /logs/verifier"),
    "plants-a-pipe": _planted(f"mkfifo {REWARD}.json /tests"),
    "plants-tests": _planted(f"mkdir -p /tests; echo 'echo 1 > {REWARD}.txt' > /tests/test.sh"),
    # What runs, and as whom.
    "entry-point-leaves-a-daemon": Trap(
        "true",
        'before=$(stat -c %.9Y /run/beat); sleep 1; [ "$(stat -c %.9Y /run/beat)" != "$before" ] '
        f"&& {_says('1')} || {_says('0')}",
        1.0,
        environment="",
        files={
            "environment/Dockerfile": "FROM debian:bookworm\nCOPY start /start\n"
            'RUN chmod 755 /start\nENTRYPOINT ["/start"]\n',
            "environment/start": DAEMON,
        },
    ),
    "agent-runs-out-of-time": Trap(
        "setsid sleep 4321 >/dev/null 2>&1 </dev/null & touch /root/begun; sleep 1234",
        "ls /proc/[0-9]*/cmdline | xargs cat 2>/dev/null | tr '\\0' ' ' | grep -qE "
        f"'sleep (4321|1234)' && {_says('0')} || {_says('1')}; [ -e /root/begun ] || {_says('0')}",
        1.0,
        agent_s=2.0,
    ),
    "service-lives-on": Trap(
        "setsid sleep 4321 >/dev/null 2>&1 </dev/null &",
        "ls /proc/[0-9]*/cmdline | xargs cat 2>/dev/null | tr '\\0' ' ' "
        f"| grep -q 'sleep 4321' && {_says('1')} || {_says('0')}",
        1.0,
    ),
    "agent-is-nobody": Trap(
        "id -un > /tmp/who; echo x > /root/x; true",
        f"[ $(cat /tmp/who) = nobody ] && [ ! -e /root/x ] && {_says('1')} || {_says('0')}",
        1.0,
        agent='user = "nobody"',
    ),
    "verifier-is-nobody": Trap(
        "true",
        f"[ $(id -un) = nobody ] && {_says('1')} || {_says('0')}",
        1.0,
        verifier='user = "nobody"',
    ),
    "tests-take-for-ever": Trap("true", "sleep 1000", "verifier_deadline", verifier_s=2.0),
    "memory-is-limited": Trap(
        "head -c 300M /dev/zero | tail; echo $? > /tmp/code",
        f"[ $(cat /tmp/code) != 0 ] && {_says('1')} || {_says('0')}",
        1.0,
        memory_mb=128,
    ),
    "works-elsewhere": Trap(
        "pwd > /tmp/where",
        f"[ $(cat /tmp/where) = /srv ] && {_says('1')} || {_says('0')}",
        1.0,
        environment=f'{IMAGE}\nworkdir = "/srv"',
    ),
    # Health.
    "becomes-healthy": Trap(
        "true",
        _says("1"),
        1.0,
        environment=f'{IMAGE}\n[environment.healthcheck]\ncommand = "[ -e /root/seen ] || '
        '! touch /root/seen"\ninterval_sec = 0.1\nretries = 3',
    ),
    "is-never-healthy": Trap(
        "true",
        _says("1"),
        "unhealthy",
        environment=f'{IMAGE}\n[environment.healthcheck]\ncommand = "exit 3"\n'
        "interval_sec = 0.1\nretries = 2",
    ),
    # A separate verifier, and what travels to it.
    "graded-apart": Trap(
        "cd /srv; truncate -s 64M disk.img; printf tail >> disk.img; printf x > tool; "
        "chmod 750 tool; ln -s tool link; ln -s /etc/passwd out; mkfifo pipe; touch /root/left",
        f"{ARRIVED.strip()} && {_says('1')} || {_says('0')}",
        1.0,
        root='artifacts = ["/srv"]',
        verifier='environment_mode = "separate"\n[verifier.environment]\n'
        'network_mode = "no-network"\nmemory_mb = 512',
        files={
            "tests/Dockerfile": "FROM debian:bookworm\nCOPY test.sh /tests/test.sh\n"
            "RUN chmod 755 /tests/test.sh\n"
        },
    ),
    # Steps.
    "stops-below-its-minimum": _steps(
        _step("one", 0.25, minimum=0.5), _step("two", 1.0), outcome=0.25, strategy="mean"
    ),
    "goes-on-above-its-minimum": _steps(
        _step("one", 0.5, minimum=0.5), _step("two", 1.0), outcome=0.75, strategy="mean"
    ),
    "counts-its-last-step": _steps(
        _step("one", 0.5), _step("two", 1.0), outcome=1.0, strategy="final"
    ),
}
