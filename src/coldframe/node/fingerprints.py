"""Digests of a sandbox's state by parts."""

from __future__ import annotations

from coldframe.node.life import Sandbox
from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.models import Fingerprint
from coldframe.runtimes.base import SandboxHandle


async def take(sandbox: Sandbox, handle: SandboxHandle) -> Fingerprint:
    """Not there yet."""
    raise CapabilityError("fingerprints are not there yet")
