"""Which fields of a task.toml are honoured, and the names by which the others are refused.

Harbor's schema 1.0 to 1.4. Three kinds of field: those that are honoured; those that are known
and not honoured yet, fine only with a value that asks for nothing; and those that nobody knows,
which are refused too: a misspelt limit is a limit that is silently not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")

HONOURED: dict[str, frozenset[str]] = {
    "": frozenset({"schema_version", "version", "source"}),
    "task": frozenset({"name", "description", "authors", "keywords"}),
    "agent": frozenset({"timeout_sec", "user", "network_mode", "allowed_hosts"}),
    "verifier": frozenset({"timeout_sec", "env", "user", "network_mode", "allowed_hosts"}),
    "environment": frozenset(
        {
            "build_timeout_sec",
            "docker_image",
            "cpus",
            "memory_mb",
            "storage_mb",
            "memory",
            "storage",
            "env",
            "workdir",
            "network_mode",
            "allowed_hosts",
            "allow_internet",
        }
    ),
    "solution": frozenset({"env"}),
    "metadata.coldframe": frozenset({"full_kill", "pass_threshold"}),
}
SECTIONS = ("task", "agent", "verifier", "environment", "solution", "metadata")

# Field → the values that ask for nothing, so that they may stand there.
NOT_YET: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"artifacts": ([], ""), "multi_step_reward_strategy": ("mean", "final"), "steps": ([],)},
    "agent": {},
    "verifier": {"environment_mode": ("shared",), "environment": ({},), "collect": ([],)},
    "environment": {
        "os": ("linux",),
        "gpus": (0,),
        "gpu_types": ([],),
        "tpu": ({}, ""),
        "mcp_servers": ([],),
        "skills_dir": ("",),
        "healthcheck": ({},),
    },
    "solution": {},
    "task": {},
    "metadata.coldframe": {},
}
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG])I?B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_ENV_NAME = re.compile(r"[^\0=]+")


@dataclass
class Fields:
    """A task.toml being read; every problem is kept, so that all are reported at once."""

    file: Path
    data: dict[str, Any]
    host_env: Mapping[str, str]
    problems: list[str] = field(default_factory=list)
    resolved: set[str] = field(default_factory=set)
    """Values that came from this machine's environment: secrets until proven otherwise."""

    def problem(self, section: str, name: str, text: str) -> None:
        """Note what is wrong with one field."""
        where = f"[{section}] {name}" if section else name
        self.problems.append(f"{self.file}: {where} {text}")

    def check_known(self) -> None:
        """Note every field that is unknown or not honoured yet."""
        self._check_section("", {k: v for k, v in self.data.items() if k not in SECTIONS})
        for section in SECTIONS:
            values = self.section(section)
            if section != "metadata":
                self._check_section(section, values)
            elif "coldframe" in values:
                self._check_section("metadata.coldframe", self._table("metadata", "coldframe"))

    def _check_section(self, section: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in HONOURED[section]:
                continue
            neutral = NOT_YET[section].get(name)
            if neutral is None:
                self.problem(section, name, "is not a field that is known here")
            elif not any(value == one and type(value) is type(one) for one in neutral):
                self.problem(section, name, f"= {_brief(value)} is not honoured yet")

    def section(self, section: str) -> dict[str, Any]:
        """Return a section, empty if it is not there or not a table (which is noted once)."""
        value = self.data.get(section, {})
        if not isinstance(value, dict):
            self.data[section] = {}
            self.problem("", section, "is not a table")
            return {}
        return value

    def _table(self, section: str, name: str) -> dict[str, Any]:
        value = self.section(section).get(name, {})
        if isinstance(value, dict):
            return value
        self.section(section)[name] = {}
        self.problem(section, name, "is not a table")
        return {}

    def extension(self, name: str, default: Any, accepted: type | tuple[type, ...]) -> Any:
        """Return a field of `[metadata.coldframe]`."""
        value = self._table("metadata", "coldframe").get(name, default)
        if isinstance(value, bool) is not (accepted is bool) or not isinstance(value, accepted):
            self.problem("metadata.coldframe", name, f"= {_brief(value)} has the wrong type")
            return default
        return value

    def _take(
        self, section: str, name: str, accept: Callable[[Any], bool], expected: str
    ) -> Any | None:
        value = self.section(section).get(name) if section else self.data.get(name)
        if value is None or accept(value):
            return value
        self.problem(section, name, f"= {_brief(value)} is not {expected}")
        return None

    def text(self, section: str, name: str) -> str | None:
        """Return a text field."""
        return self._take(section, name, lambda v: isinstance(v, str) and bool(v), "a text")

    def number(self, section: str, name: str) -> float | None:
        """Return a positive, finite number."""
        value = self._take(section, name, _is_positive, "a positive number")
        return None if value is None else float(value)

    def flag(self, section: str, name: str) -> bool | None:
        """Return a boolean."""
        return self._take(section, name, lambda v: isinstance(v, bool), "true or false")

    def user(self, section: str) -> str | int | None:
        """Return a user's name or id."""
        return self._take(section, "user", _is_user, "a user name or a number from 0 on")

    def megabytes(self, name: str, older: str) -> int | None:
        """Return a size in MiB, from `name` or from its older spelling with a unit."""
        value = self.number("environment", name)
        text = self.text("environment", older)
        if text is None:
            return None if value is None else math.ceil(value)
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            self.problem("environment", older, f"= {text!r} is not a size such as 512M or 2G")
            return None
        if value is not None:
            self.problem("environment", older, f"and {name} both give the size")
        return math.ceil(float(match.group(1)) * _MIB[match.group(2).upper()])

    def environment(self, section: str) -> dict[str, str]:
        """Return `env` with `${NAME}` and `${NAME:-default}` taken from this machine."""
        raw = self._take(section, "env", lambda v: isinstance(v, dict), "a table") or {}
        result = {}
        for name, value in raw.items():
            if not isinstance(value, str) or not _ENV_NAME.fullmatch(name) or "\0" in value:
                self.problem(section, f"env.{name}", f"= {_brief(value)} is not a text")
            else:
                result[name] = self._resolve(section, name, value)
        return result

    def _resolve(self, section: str, name: str, value: str) -> str:
        def replace(match: re.Match[str]) -> str:
            variable, default = match.group(1), match.group(2)
            found = self.host_env.get(variable)
            if found is not None:
                self.resolved.add(found)
                return found
            if default is None:
                self.problem(section, f"env.{name}", f"needs ${{{variable}}}, which is not set")
            return default or ""

        return _TEMPLATE.sub(replace, value)

    def network(self) -> str | None:
        """Return what the task declares for its environment, and note what is not honoured.

        A task that says nothing gets no network: see docs/rollouts.md for why.
        """
        declared = self._mode("environment")
        allowed = self.flag("environment", "allow_internet")
        if allowed is True and declared != "no-network":
            self.problem("environment", "allow_internet", "= true is not honoured yet")
        self._mode("agent")
        self._mode("verifier")
        return declared or ("no-network" if allowed is False else None)

    def _mode(self, section: str) -> str | None:
        mode = self.text(section, "network_mode")
        hosts = self._take(section, "allowed_hosts", lambda v: isinstance(v, list), "a list")
        if mode not in {None, "public", "no-network", "allowlist"}:
            self.problem(
                section, "network_mode", f"= {mode!r} is none of public, no-network, allowlist"
            )
        elif mode in {"public", "allowlist"}:
            self.problem(section, "network_mode", f'= "{mode}" is not honoured yet')
        if hosts:
            self.problem(section, "allowed_hosts", f"= {_brief(hosts)} is not honoured yet")
        return mode


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _is_user(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _brief(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
