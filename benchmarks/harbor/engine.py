"""A Docker engine of our own for one measurement: started in a directory, gone with it.

It makes no network and no firewall rules. Debian 12 has no `docker compose`, which Harbor calls;
where the machine has none, `compose.py` stands in: it calls docker itself for each step and does
nothing else, so Docker's number is rather too good than too bad.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.compare import Unavailable
from coldframe.images.store import ImageStore
from coldframe.node.settings import NodeSettings

START_S = 60.0
STOP_S = 60.0
_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def engine(image: str, scratch: Path) -> Iterator[dict[str, str]]:
    """Start an engine that has `image` of our store; give the variables by which it is reached.

    Raises:
        Unavailable: there is none, or it does not start here.
    """
    for program in ("dockerd", "docker"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed: apt-get install docker.io")
    before = _cgroups()
    place = scratch / "docker"
    place.mkdir()
    with (place / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                *("dockerd", "--bridge=none", "--iptables=false", "--ip6tables=false"),
                *("--data-root", str(place / "data"), "--exec-root", str(place / "exec")),
                *("--pidfile", str(place / "pid"), "-H", f"unix://{place}/sock"),
            ],
            stdout=log,
            stderr=log,
        )
    env = {"DOCKER_HOST": f"unix://{place}/sock", "DOCKER_CONFIG": str(place / "config")}
    try:
        _ready(daemon, env, place / "log")
        _stand_in(env, place / "config")
        _load(image, env)
        yield env
    finally:
        _end(daemon, env, place)
        for cgroup in sorted(_cgroups() - before, reverse=True):
            with suppress(OSError):
                cgroup.rmdir()


def _ready(daemon: subprocess.Popen[bytes], env: Mapping[str, str], log: Path) -> None:
    until = time.monotonic() + START_S
    while _docker(env, "version").returncode:
        if daemon.poll() is not None or time.monotonic() > until:
            last = log.read_text("utf-8", "replace").strip().splitlines()[-3:]
            raise Unavailable(f"dockerd does not start here: {' | '.join(last)[-400:]}")
        time.sleep(0.2)


def _docker(env: Mapping[str, str], *argv: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["docker", *argv], env=os.environ | dict(env), capture_output=True, check=False, timeout=60
    )


def _stand_in(env: Mapping[str, str], config: Path) -> None:
    if not _docker(env, "compose", "version").returncode:
        return
    plugin = config / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True)
    source = Path(__file__).with_name("compose.py").read_text()
    plugin.write_text(f"#!{sys.executable} -SE\n{source}")
    plugin.chmod(0o755)


def _load(image: str, env: Mapping[str, str]) -> None:
    store = ImageStore(NodeSettings.from_environment().home / "images")
    resolved = store.resolve(image)
    if len(resolved.layers) != 1:
        raise Unavailable(f"{image} has {len(resolved.layers)} layers; this needs one")
    root = store.layers_directory / resolved.layers[0] / "root"
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(
            ["docker", "import", "-", image],
            env=os.environ | dict(env),
            stdin=tar.stdout,
            capture_output=True,
            check=False,
        )
    if done.returncode:
        raise Unavailable(f"docker import: {done.stderr.decode('utf-8', 'replace').strip()}")


def _end(daemon: subprocess.Popen[bytes], env: Mapping[str, str], place: Path) -> None:
    left = _docker(env, "ps", "-aq").stdout.decode().split()
    if left:
        _docker(env, "rm", "-f", *left)
    daemon.terminate()
    try:
        daemon.wait(STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        mounted = line.split()[1]
        if mounted.startswith(f"{place}/"):
            subprocess.run(["umount", "-l", mounted], check=False)


def _cgroups() -> set[Path]:
    found = {*_CGROUPS.glob("docker"), *_CGROUPS.glob("*/docker")}
    return found | {one for each in found for one in each.rglob("*") if one.is_dir()}
