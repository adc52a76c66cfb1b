"""What a rollout takes from the environment of its process: nothing but what it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from coldframe.protocol.errors import InvalidRequestError

DEFAULT_API_KEY_ENV = "OPENAI_API_KEY"


@dataclass(frozen=True)
class RolloutSettings:
    """The process's environment, as tasks and models may ask for parts of it by name."""

    host_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Where `${NAME}` in a task's `env` tables comes from."""

    @classmethod
    def from_environment(cls) -> RolloutSettings:
        """Take this process's environment."""
        return cls(MappingProxyType(dict(os.environ)))

    def api_key(self, name: str | None) -> str | None:
        """Return the key in the variable of that name, or in the usual one if it is set.

        Raises:
            InvalidRequestError: a variable was named and is not set.
        """
        if name is None:
            return self.host_env.get(DEFAULT_API_KEY_ENV) or None
        key = self.host_env.get(name)
        if not key:
            raise InvalidRequestError(f"--api-key-env {name}: this variable is not set")
        return key
