"""What an environment of ours can do for a task of Harbor's, and what it refuses.

Harbor makes an environment per trial (and per separate verifier), long before it is started. What
cannot be done is noted then and refused at the start: an exception in a constructor would end the
whole job, its healthy trials too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harbor.environments.base import BaseEnvironment
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.environments.definition import (
    COMPOSE_FILE_NAME,
    require_agent_environment_definition,
)

from coldframe.client import AsyncSandboxClient
from coldframe.integrations.harbor import declared
from coldframe.protocol.errors import CapabilityError, TaskError
from coldframe.rollouts.places import VERIFIER_LOGS

AGENT_LOGS = "/logs/agent"
LOGS = (AGENT_LOGS, "/logs/artifacts", VERIFIER_LOGS)


class JudgedEnvironment(BaseEnvironment):
    """Holds a task against what a sandbox can be made to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Harbor's constructor asks for capabilities and runs every check.
        self._refusals: list[str] = []
        self._terms = declared.Terms()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Harbor's name of it."""
        return "coldframe"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What is enforced. A node that cannot hold a task's policy refuses it at its start."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Limits are limits; nothing is reserved."""
        known = EnvironmentResourceCapabilities.model_fields
        flags = dict.fromkeys(("cpu_limit", "memory_limit", "fractional_cpus"), True)
        return EnvironmentResourceCapabilities(**{k: v for k, v in flags.items() if k in known})

    def _refuse_what_was_noted(self) -> None:
        """Raise CapabilityError for a task that asks for what no node could do."""
        if self._refusals:
            raise CapabilityError("; ".join(self._refusals))

    async def _refuse_what_cannot_be_enforced(self, client: AsyncSandboxClient) -> None:
        """Raise CapabilityError for a task with a network policy where none can be enforced."""
        can = await client.capabilities()
        if can.egress:
            return
        for policy in (self._network_policy, *self._phase_network_policies):
            if not declared.policy_of(policy).empty:
                why = can.details.get("network") or f"runtime {can.runtime!r} has none"
                raise CapabilityError(
                    f"network_mode = {policy.network_mode.value!r} cannot be enforced here: {why}"
                )

    # --- what Harbor's constructor asks -----------------------------------------------

    def _validate_definition(self) -> None:
        if (self.environment_dir / COMPOSE_FILE_NAME).exists():
            self._refusals.append(f"{self.environment_dir / COMPOSE_FILE_NAME}: no compose files")
            return
        try:
            require_agent_environment_definition(
                self.environment_dir, docker_image=self.task_env_config.docker_image
            )
            self._terms = declared.read_terms(self.environment_dir)
            for policy in (self._network_policy, *self._phase_network_policies):
                declared.policy_of(policy)
        except (FileNotFoundError, TaskError) as error:
            self._refusals.append(str(error))
        strange = [one for one in self._mount_targets() if one not in LOGS]
        if strange:
            self._refusals.append(f"mounts of this machine are not honoured: {', '.join(strange)}")

    def _validate_gpu_support(self) -> None:
        self._noted(super()._validate_gpu_support)

    def _validate_tpu_support(self) -> None:
        self._noted(super()._validate_tpu_support)

    def _validate_windows_support(self) -> None:
        self._noted(super()._validate_windows_support)

    def _noted(self, check: Callable[[], Any]) -> None:
        try:
            check()
        except RuntimeError as error:
            self._refusals.append(str(error))
