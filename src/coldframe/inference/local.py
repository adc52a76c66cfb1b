"""A proxy on loopback, in the process that runs attempts and for as long as it does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from coldframe.inference.app import ProxyApp
from coldframe.inference.proxy import Proxy, ProxySettings
from coldframe.inference.server import serving

M = TypeVar("M")


class LocalCapture:
    """See `rollouts.capture`, whose protocol it keeps."""

    def __init__(self, proxy: Proxy, base_url: str) -> None:
        self.proxy, self.base_url = proxy, base_url

    @property
    def level(self) -> str:
        return self.proxy.settings.capture.value

    def begin(self, attempt_id: str, journal: Path, model: M) -> M:
        key = self.proxy.mint(attempt_id, journal)
        settings: M = replace(model, base_url=f"{self.base_url}/v1", api_key=key)  # type: ignore[type-var]
        return settings

    def begin_step(self, attempt_id: str, name: str) -> None:
        self.proxy.begin_step(attempt_id, name)

    def end(self, attempt_id: str) -> list[str]:
        return self.proxy.end(attempt_id)


@contextlib.asynccontextmanager
async def local_capture(settings: ProxySettings) -> AsyncIterator[LocalCapture]:
    """Serve while entered, once the engine has shown that it gives what is to be captured.

    Raises:
        InferenceError: it does not.
    """
    async with Proxy(settings) as proxy:
        await proxy.check()
        async with serving(ProxyApp(proxy)) as base_url:
            yield LocalCapture(proxy, base_url)
