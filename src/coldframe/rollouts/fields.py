"""Read a task.toml field by field, and refuse by name whatever nobody asked for.

A `Table` knows a field by its being read. What is left over when a table is closed is refused
with the nearest known name: a misspelt limit is a limit that is silently not there. Every
problem is kept, so that all are reported at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ENV_NAME = re.compile(r"[^\0=]+")


@dataclass
class Source:
    """One task.toml being read."""

    file: Path
    host_env: Mapping[str, str]
    """Where `${NAME}` comes from."""
    problems: list[str] = field(default_factory=list)
    resolved: set[str] = field(default_factory=set)
    """Values that came from this machine's environment: secrets until proven otherwise."""


class Table:
    """One table of it. Getters return None, or the default, where a field is absent or wrong."""

    def __init__(self, source: Source, data: Mapping[str, Any], path: str = "") -> None:
        self.source, self.path = source, path
        self._data = data
        self._known: dict[str, None] = {}

    def problem(self, name: str, text: str) -> None:
        """Note what is wrong with one field."""
        where = f"[{self.path}] {name}" if self.path else name
        self.source.problems.append(f"{self.source.file}: {where} {text}")

    def has(self, name: str) -> bool:
        """Whether the field stands there; it is known from then on."""
        self._known[name] = None
        return name in self._data

    def raw(self, name: str) -> Any:
        """Return a field as it stands there."""
        return self._data[name] if self.has(name) else None

    def close(self) -> None:
        """Note every field that nobody has asked for."""
        for name in self._data:
            if name not in self._known:
                near = get_close_matches(name, self._known, n=1, cutoff=0.5)
                hint = f"; the nearest is {near[0]}" if near else ""
                self.problem(name, f"is not a field that is known here{hint}")

    def refuse(self, name: str, neutral: tuple[Any, ...], why: str = "is not honoured yet") -> None:
        """Know a field that is not honoured: it may only hold what asks for nothing."""
        value = self.raw(name)
        if value is None or any(value == one and type(value) is type(one) for one in neutral):
            return
        self.problem(name, f"= {brief(value)} {why}")

    def take(self, name: str, accept: Callable[[Any], bool], expected: str) -> Any | None:
        """Return a field that is accepted, and note one that is not."""
        value = self.raw(name)
        if value is None or accept(value):
            return value
        self.problem(name, f"= {brief(value)} is not {expected}")
        return None

    def table(self, name: str) -> Table:
        """Return a table in this one, empty if it is not there."""
        value = self.take(name, lambda v: isinstance(v, dict), "a table")
        return self.entry(name, value or {})

    def tables(self, name: str) -> list[Table]:
        """Return a list of tables; the label of each is its `name`, or its number from 1."""
        value = self.take(
            name,
            lambda v: isinstance(v, list) and all(isinstance(one, dict) for one in v),
            "a list of tables",
        )
        below = []
        for number, one in enumerate(value or [], start=1):
            label = one.get("name")
            below.append(self.entry(f"{name}.{label if isinstance(label, str) else number}", one))
        return below

    def but(self, name: str) -> dict[str, Any]:
        """Return all of it as it stands there, without one field."""
        return {key: value for key, value in self._data.items() if key != name}

    @property
    def empty(self) -> bool:
        """Whether nothing stands in it."""
        return not self._data

    def entry(self, name: str, data: Mapping[str, Any]) -> Table:
        """Return a table below this one."""
        return Table(self.source, data, f"{self.path}.{name}" if self.path else name)

    def text(self, name: str) -> str | None:
        """Return a text; an empty one is wrong."""
        return self.take(name, lambda v: isinstance(v, str) and bool(v.strip()), "a text")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self.take(name, _is_texts, "a list of texts")
        return tuple(value or ())

    def choice(self, name: str, options: tuple[str, ...]) -> Any | None:
        """Return a text that is one of some."""
        return self.take(name, lambda v: v in options, f"one of {', '.join(options)}")

    def number(self, name: str, *, zero: bool = False) -> float | None:
        """Return a finite number above 0, or from 0 on."""
        expected = "a number from 0 on" if zero else "a positive number"
        value = self.take(name, lambda v: is_number(v) and (v > 0 or (zero and v == 0)), expected)
        return None if value is None else float(value)

    def count(self, name: str) -> int | None:
        """Return a whole number from 1 on."""
        return self.take(name, lambda v: type(v) is int and v >= 1, "a whole number from 1 on")

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.take(name, lambda v: isinstance(v, bool), "true or false")
        return default if value is None else bool(value)

    def user(self, name: str = "user") -> str | int | None:
        """Return a user's name or id."""
        return self.take(name, _is_user, "a user name or a number from 0 on")

    def environment(self, name: str = "env") -> dict[str, str]:
        """Return a table of texts with `${NAME}` and `${NAME:-default}` taken from this machine."""
        raw = self.take(name, lambda v: isinstance(v, dict), "a table") or {}
        result = {}
        for key, value in raw.items():
            if not isinstance(value, str) or not _ENV_NAME.fullmatch(key) or "\0" in value:
                self.problem(f"{name}.{key}", f"= {brief(value)} is not a text")
            else:
                result[key] = self._resolve(f"{name}.{key}", value)
        return result

    def _resolve(self, name: str, value: str) -> str:
        def replace(match: re.Match[str]) -> str:
            variable, default = match.group(1), match.group(2)
            found = self.source.host_env.get(variable)
            if found is not None:
                self.source.resolved.add(found)
                return found
            if default is None:
                self.problem(name, f"needs ${{{variable}}}, which is not set")
            return default or ""

        return _TEMPLATE.sub(replace, value)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def brief(value: Any) -> str:
    """Return a value as it may stand in a message."""
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one.strip() for one in value)


def _is_user(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
