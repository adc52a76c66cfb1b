"""Find or build the image of a task, once per content however many attempts want it."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coldframe.protocol.errors import CreateError, NotPermittedError
from coldframe.protocol.network import PRESETS, NetworkPolicy
from coldframe.rollouts.digests import tree_digest
from coldframe.rollouts.task import EnvironmentSpec, Task

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient

BUILD_NETWORK = NetworkPolicy(presets=PRESETS)
"""This machine's own apt, pip and npm indexes; the tasks' own modes are for their phases."""
AGENT_IMAGE = "agent"
"""Role of the image that the agent acts in; see `verifier_image` for the others."""
QUIET_S = 2.0
"""A build that takes no longer, as one whose steps were done before, is not worth a line."""
_UNSAFE = re.compile(r"[^a-z0-9]+")
_LABEL = 64
"""Characters: it is there to be read, the digest tells images apart."""


class BuildDeadlineError(CreateError):
    """The image took longer to build than the task allows."""

    code = "build_deadline"
    retryable = False


def verifier_image(step: str | None) -> str:
    """Return the role of the image of a separate verifier."""
    return f"verifier of {step}" if step else "verifier"


@dataclass(frozen=True)
class Built:
    """An image that is in the store."""

    name: str
    built: bool
    """Made from the task's own Dockerfile, not found by name."""
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    """What its RUN steps may reach."""


class ImageBuilder:
    """Hands out images by task; concurrent requests for one content share one build."""

    def __init__(
        self, client: AsyncSandboxClient, *, heard: Callable[[str], None] = lambda line: None
    ) -> None:
        """`heard` is called with a line about each build that takes a while."""
        self._client, self._heard = client, heard
        self._builds: dict[tuple[str, bool], asyncio.Task[Built]] = {}

    async def image(self, task: Task, spec: EnvironmentSpec | None = None) -> Built:
        """Return the image of a task's environment, or of a separate verifier's.

        Args:
            spec: of the verifier; None: the task's own.
        Raises:
            ImageNotFoundError: when the sandbox is created, if `docker_image` is not there.
            DockerfileError: the Dockerfile is refused, with file and line.
            BuildStepError: a RUN failed, with file and line.
            BuildDeadlineError: `build_timeout_sec` has passed.
            NotPermittedError: it would have to be built, which needs the scope `admin`.
        """
        return await self.of_spec(task.key, spec or task.environment)

    async def of_spec(self, label: str, spec: EnvironmentSpec, *, cached: bool = True) -> Built:
        """Return the image of an environment.

        Args:
            label: goes into the name of an image that is built.
            cached: whether steps that were done before are taken from the store.
        Raises:
            What `image` raises.
        """
        if spec.docker_image is not None or spec.dockerfile is None:
            return Built(spec.docker_image or "", built=False)
        key = await asyncio.to_thread(tree_digest, spec.context), cached
        build = self._builds.get(key)
        if build is None or (build.done() and (build.cancelled() or build.exception())):
            build = asyncio.create_task(self._build(label, spec, *key))
            self._builds[key] = build
        # One attempt that gives up must not take the build from the others.
        return await asyncio.shield(build)

    async def _build(self, label: str, spec: EnvironmentSpec, key: str, cached: bool) -> Built:
        assert spec.dockerfile is not None
        stem = _UNSAFE.sub("-", label.lower())[:_LABEL].strip("-") or "task"
        name = f"task/{stem}:{key[:12]}"
        # Where nothing can be enforced RUN gets nothing; most Dockerfiles do without.
        egress = (await self._client.capabilities()).egress
        network = BUILD_NETWORK if egress else NetworkPolicy()
        begun = time.monotonic()
        said = asyncio.get_running_loop().call_later(
            QUIET_S, self._heard, f"{label}: building its image from {spec.dockerfile}"
        )
        try:
            async with asyncio.timeout(spec.build_timeout_s):
                await self._client.build_image(
                    name=name,
                    context=spec.context,
                    dockerfile=spec.dockerfile,
                    network=network,
                    deadline_s=spec.build_timeout_s,
                    cached=cached,
                )
        except TimeoutError:
            raise BuildDeadlineError(
                f"{os.fspath(spec.dockerfile)}: not built within "
                f"[environment] build_timeout_sec = {spec.build_timeout_s:g}"
            ) from None
        except NotPermittedError:
            # Its name says its content, so whoever may not build may take what somebody built.
            if not cached or not await self._is_there(name):
                raise
        finally:
            said.cancel()
        lasted = time.monotonic() - begun
        if lasted >= QUIET_S:
            self._heard(f"{label}: its image is built, {lasted:.0f} s")
        return Built(name, built=True, network=network)

    async def _is_there(self, name: str) -> bool:
        return any(one.name == name for one in await self._client.list_images())

    async def close(self) -> None:
        """End the builds that still run."""
        running = [one for one in self._builds.values() if not one.done()]
        for build in running:
            build.cancel()
        await asyncio.gather(*running, return_exceptions=True)
