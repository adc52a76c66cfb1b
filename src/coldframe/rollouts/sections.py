"""Read the tables of a task.toml that may stand in more than one place of it."""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePosixPath
from typing import Any, cast, get_args

from coldframe.harnesses.base import McpServer, McpTransport
from coldframe.rollouts.artifacts import MAIN_SERVICE, MANIFEST, Artifact
from coldframe.rollouts.fields import Table, brief, is_number
from coldframe.rollouts.networks import PUBLIC, read_baseline
from coldframe.rollouts.task import (
    DEFAULT_BUILD_S,
    CollectHook,
    EnvironmentSpec,
    Healthcheck,
)

MCP_TRANSPORTS = (*get_args(McpTransport), "http")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG])I?B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def read_environment(table: Table, context: Path) -> EnvironmentSpec:
    """Read `[environment]`, or a verifier's own.

    Args:
        context: the directory whose Dockerfile is built when there is no `docker_image`.
    """
    declared = read_baseline(table)
    table.refuse("os", ("linux", "Linux", "LINUX"), "is no system that is run here; linux is")
    table.refuse("gpus", (0,))
    table.refuse("gpu_types", ([],))
    table.refuse("tpu", ({},))
    health = table.table("healthcheck") if table.has("healthcheck") else None
    dockerfile = context / "Dockerfile"
    spec = EnvironmentSpec(
        docker_image=table.text("docker_image"),
        dockerfile=dockerfile if dockerfile.is_file() else None,
        context=context,
        build_timeout_s=table.number("build_timeout_sec") or DEFAULT_BUILD_S,
        cpus=table.number("cpus"),
        memory_mb=_megabytes(table, "memory_mb", "memory"),
        storage_mb=_megabytes(table, "storage_mb", "storage"),
        env=table.environment(),
        workdir=_absolute(table, "workdir"),
        network=(declared or PUBLIC).policy,
        network_declared=None if declared is None else declared.mode,
        healthcheck=None if health is None else read_healthcheck(health),
        mcp_servers=_mcp_servers(table),
        skills_dir=_absolute(table, "skills_dir") if table.raw("skills_dir") != "" else None,
    )
    table.close()
    return spec


def read_healthcheck(table: Table) -> Healthcheck | None:
    """Read a healthcheck; an empty table is none."""
    command = table.text("command")
    default = Healthcheck("")
    given = {
        "interval_s": table.number("interval_sec", zero=True),
        "timeout_s": table.number("timeout_sec"),
        "start_period_s": table.number("start_period_sec", zero=True),
        "start_interval_s": table.number("start_interval_sec", zero=True),
    }
    retries = table.count("retries")
    table.close()
    if command is None:
        if not table.empty and not table.has("command"):
            table.problem("command", "is missing; it is what the healthcheck runs")
        return None
    times = {name: getattr(default, name) if v is None else v for name, v in given.items()}
    return Healthcheck(command, **times, retries=retries or default.retries)


def read_artifacts(table: Table) -> list[Artifact]:
    """Read `artifacts`: paths, or tables of source, destination, exclude and service."""
    value = table.take("artifacts", lambda v: isinstance(v, list), "a list") or []
    found = []
    for number, one in enumerate(value, start=1):
        if not isinstance(one, str | dict):
            table.problem("artifacts", f"has {brief(one)}, which is neither a path nor a table")
            continue
        entry = table.entry(f"artifacts.{number}", {"source": one} if isinstance(one, str) else one)
        artifact = _artifact(entry)
        entry.close()
        if artifact is not None:
            found.append(artifact)
    return found


def _artifact(table: Table) -> Artifact | None:
    source, destination = table.text("source"), table.raw("destination")
    exclude = table.texts("exclude")
    table.refuse("service", (MAIN_SERVICE,), "is a side service; those are not honoured yet")
    if source is None:
        if not table.has("source"):
            table.problem("source", "is missing; it is the path to take")
        return None
    path = PurePosixPath(source)
    if not path.is_absolute() or ".." in path.parts or "\0" in source:
        table.problem("source", f"= {brief(source)} is not an absolute path without ..")
        return None
    if destination is not None and not _is_destination(destination):
        table.problem(
            "destination",
            f"= {brief(destination)} is not a relative path without .., and other than {MANIFEST}",
        )
        return None
    return Artifact(str(path), destination or None, exclude)


def _is_destination(value: Any) -> bool:
    if not isinstance(value, str) or "\\" in value or "\0" in value:
        return False
    path = PurePosixPath(value)
    if value and not path.parts:
        return False
    return not path.is_absolute() and ".." not in path.parts and str(path) != MANIFEST


def read_collect(table: Table) -> tuple[CollectHook, ...]:
    """Read `[[collect]]` of a verifier."""
    hooks = []
    for one in table.tables("collect"):
        command = one.text("command")
        if command is None and not one.has("command"):
            one.problem("command", "is missing; it is what is run")
        one.refuse("service", (MAIN_SERVICE,), "is a side service; those are not honoured yet")
        timeout, user = one.number("timeout_sec"), one.user()
        one.close()
        if command is not None:
            hooks.append(CollectHook(command, timeout or CollectHook.timeout_s, user))
    return tuple(hooks)


def read_min_reward(table: Table) -> dict[str, float] | None:
    """Read `min_reward`: a number is that of the part `reward`."""
    value = table.raw("min_reward")
    if value is None:
        return None
    if is_number(value):
        return {"reward": float(value)}
    if isinstance(value, dict) and value and all(map(is_number, value.values())):
        return {name: float(least) for name, least in value.items()}
    table.problem("min_reward", f"= {brief(value)} is neither a number nor a table of numbers")
    return None


def _mcp_servers(table: Table) -> tuple[McpServer, ...]:
    servers: dict[str, McpServer] = {}
    for one in table.tables("mcp_servers"):
        name, url, command = one.text("name"), one.text("url"), one.text("command")
        said = one.choice("transport", MCP_TRANSPORTS) or "sse"
        transport = cast("McpTransport", "streamable-http" if said == "http" else said)
        args, headers = one.texts("args"), one.environment("headers")
        one.close()
        if name is None:
            one.problem("name", "is missing")
            continue
        if name in servers:
            one.problem("name", f"= {brief(name)} stands there twice")
        needed = "command" if transport == "stdio" else "url"
        if not one.has(needed):
            one.problem(needed, f"is missing; transport {transport} needs it")
        if transport == "stdio" and headers:
            one.problem("headers", "means nothing to transport stdio")
        for header, text in headers.items():
            if not _HEADER.fullmatch(header) or not text.isprintable():
                one.problem(f"headers.{header}", "is no header")
        servers[name] = McpServer(
            name=name,
            transport=transport,
            url=url,
            command=command,
            args=args,
            headers=headers,
        )
    return tuple(servers.values())


def _absolute(table: Table, name: str) -> str | None:
    path = table.text(name)
    if path is not None and not path.startswith("/"):
        table.problem(name, f"= {path!r} is not absolute")
    return path


def _megabytes(table: Table, name: str, older: str) -> int | None:
    """Return a size in MiB, from `name` or from its older spelling with a unit."""
    value, text = table.number(name), table.text(older)
    if text is None:
        return None if value is None else math.ceil(value)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        table.problem(older, f"= {text!r} is not a size such as 512M or 2G")
        return None
    if value is not None:
        table.problem(older, f"and {name} both give the size")
    return math.ceil(float(match.group(1)) * _MIB[match.group(2).upper()])
