"""Build arguments: what ARG declares, what the builder gives, and which are known beforehand."""

from __future__ import annotations

import os
from collections.abc import Mapping

from coldframe.images.configure import bounded
from coldframe.images.dockerfile import Instruction
from coldframe.images.variables import WordError, expand, split_words

PROXIES = tuple(
    one
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for one in (name, name.lower())
)
"""May be given without an ARG; RUN sees them, and they decide nothing that is kept."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def platform() -> str:
    """Return this machine's platform as Docker names it."""
    machine = os.uname().machine
    return f"linux/{_ARCHITECTURES.get(machine, machine)}"


def platform_arguments() -> dict[str, str]:
    """Return what FROM lines know without an ARG, and a stage with one."""
    system, architecture = platform().split("/")
    known: dict[str, str] = {}
    for who in ("TARGET", "BUILD"):
        known |= {
            f"{who}PLATFORM": platform(),
            f"{who}OS": system,
            f"{who}ARCH": architecture,
            f"{who}VARIANT": "",
        }
    return known


class Arguments:
    """The arguments in scope, at the head of a file or in one stage."""

    def __init__(
        self,
        given: Mapping[str, str],
        outer: Mapping[str, str],
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """Begin a scope.

        Args:
            given: by the builder; an ARG takes its value from here first.
            outer: where an ARG without a default takes its value from else.
            inherited: what the stage below has declared.
        """
        self._given, self._outer = given, outer
        self.values = dict(inherited or {})

    def declare(self, line: Instruction, env: Mapping[str, str]) -> None:
        """Take an ARG line into account; `env` is what its defaults may name.

        Raises:
            WordError: it is not well formed.
        """
        for word in split_words(line.value, line.escape):
            name, equals, default = word.partition("=")
            name = expand(name, {}, line.escape)
            if not name:
                raise WordError(f"{word!r}: write ARG NAME or ARG NAME=DEFAULT")
            seen = {**self.values, **env}
            if name in self._given:
                self.values[name] = self._given[name]
            elif equals:
                self.values[name] = expand(default, seen, line.escape)
            elif name in self._outer:
                self.values[name] = self._outer[name]
        bounded(self.values)
