"""The same work on whichever other engines this machine has.

`create_first_exec` is a container made, `/bin/true` run in it, the container removed; `exec` is
`/bin/true` in a container that runs. What an engine cannot do is null, with the reason.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_hex

from benchmarks._measure import Baseline, say, summary
from coldframe.images.store import ImageStore
from coldframe.node.settings import NodeSettings

ROUNDS = 20
CALL_MAX_S = 60


class Unavailable(Exception):
    """The engine is not here or does not work here; the text says which."""


async def _call(*argv: str) -> float:
    # A file, as a container that is left running would hold a pipe open.
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            code = await asyncio.wait_for(process.wait(), CALL_MAX_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise Unavailable(f"{' '.join(argv[:2])}: no end within {CALL_MAX_S} s") from None
        took = time.perf_counter() - start
        if code != 0:
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace").strip()[-200:]
            raise Unavailable(f"{' '.join(argv[:2])}: {text}")
    return took


def _rootfs(image: str, scratch: Path) -> Path:
    """A private copy of a single-layer image: other engines write into their root."""
    store = ImageStore(NodeSettings.from_environment().home / "images")
    resolved = store.resolve(image)
    if len(resolved.layers) != 1:
        raise Unavailable(f"{image} has {len(resolved.layers)} layers; compare needs one")
    target = scratch / "rootfs"
    shutil.copytree(store.layers_directory / resolved.layers[0] / "root", target, symlinks=True)
    return target


async def _runc(image: str, base: Baseline, scratch: Path) -> dict[str, list[float]]:
    rootfs = _rootfs(image, scratch)
    await _call("runc", "spec", "--bundle", str(scratch))
    config = scratch / "config.json"
    spec = json.loads(config.read_text("utf-8"))
    spec["process"] |= {"terminal": False, "args": ["/bin/true"]}
    spec["root"] = {"path": str(rootfs), "readonly": False}
    config.write_text(json.dumps(spec), "utf-8")
    state = ("runc", "--root", str(scratch / "state"))
    create, execs = [], []
    for _ in range(ROUNDS):
        await base.sample()
        create.append(await _call(*state, "run", "--bundle", str(scratch), f"cf-{token_hex(4)}"))
    spec["process"]["args"] = ["/bin/sleep", "600"]
    config.write_text(json.dumps(spec), "utf-8")
    name = f"cf-{token_hex(4)}"
    await _call(*state, "run", "--detach", "--bundle", str(scratch), name)
    try:
        for _ in range(ROUNDS):
            await base.sample()
            execs.append(await _call(*state, "exec", name, "/bin/true"))
    finally:
        await _call(*state, "delete", "--force", name)
    return {"create_first_exec": create, "exec": execs}


async def _bwrap(image: str, base: Baseline, scratch: Path) -> dict[str, list[float]]:
    rootfs = _rootfs(image, scratch)
    create = []
    for _ in range(ROUNDS):
        await base.sample()
        create.append(
            await _call(
                "bwrap", "--unshare-all", "--bind", str(rootfs), "/", "--proc", "/proc",
                "--dev", "/dev", "/bin/true",
            )
        )  # fmt: skip
    return {"create_first_exec": create, "exec": []}


async def _docker(image: str, base: Baseline, scratch: Path) -> dict[str, list[float]]:
    await _call("docker", "version")
    rootfs = _rootfs(image, scratch)
    tar = scratch / "rootfs.tar"
    await _call("tar", "-C", str(rootfs), "-cf", str(tar), ".")
    tag = f"coldframe-bench:{token_hex(4)}"
    await _call("docker", "import", str(tar), tag)
    create, execs = [], []
    try:
        for _ in range(ROUNDS):
            await base.sample()
            create.append(
                await _call("docker", "run", "--rm", "--network", "none", tag, "/bin/true")
            )
        name = f"cf-{token_hex(4)}"
        await _call("docker", "run", "-d", "--name", name, "--network", "none", tag, "sleep", "600")
        try:
            for _ in range(ROUNDS):
                await base.sample()
                execs.append(await _call("docker", "exec", name, "/bin/true"))
        finally:
            await _call("docker", "rm", "-f", name)
    finally:
        await _call("docker", "rmi", tag)
    return {"create_first_exec": create, "exec": execs}


_ENGINES: dict[str, Callable[[str, Baseline, Path], Awaitable[dict[str, list[float]]]]] = {
    "docker": _docker,
    "runc": _runc,
    "bwrap": _bwrap,
}


async def run(names: list[str], image: str, base: Baseline) -> dict[str, object]:
    """Measure each engine named; ratios are to the baseline taken meanwhile."""
    found: dict[str, object] = {}
    for name in names:
        if name not in _ENGINES:
            raise SystemExit(f"--compare {name}: know {', '.join(_ENGINES)}")
        say(f"compare: {name}")
        if shutil.which(name) is None:
            found[name] = {"unavailable": f"{name} is not installed"}
            continue
        base.seconds.clear()
        with tempfile.TemporaryDirectory(prefix="coldframe-compare-") as scratch:
            try:
                taken = await _ENGINES[name](image, base, Path(scratch))
            except Unavailable as error:
                found[name] = {"unavailable": str(error)}
                continue
        host = base.p50
        found[name] = {
            key: {**summary(values), "ratio": round(summary(values)["p50"] / 1e3 / host, 1)}
            if values
            else None
            for key, values in taken.items()
        }
    return found
