"""The SDK, synchronous and asynchronous from one source (`_async`, from which `_sync` comes)."""

from coldframe.client._async.client import AsyncSandboxClient
from coldframe.client._async.files import AsyncFiles
from coldframe.client._async.process import AsyncOutputStream, AsyncProcess
from coldframe.client._async.sandbox import AsyncSandbox
from coldframe.client._async.session import AsyncSession
from coldframe.client._requests import ExecOptions
from coldframe.client._sync.client import SandboxClient
from coldframe.client._sync.files import Files
from coldframe.client._sync.process import OutputStream, Process
from coldframe.client._sync.sandbox import Sandbox
from coldframe.client._sync.session import Session
from coldframe.protocol.patching import Patched

__all__ = [
    "AsyncFiles",
    "AsyncOutputStream",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncSession",
    "ExecOptions",
    "Files",
    "OutputStream",
    "Patched",
    "Process",
    "Sandbox",
    "SandboxClient",
    "Session",
]
