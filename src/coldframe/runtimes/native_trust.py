"""What a sandbox trusts while the node ends TLS for it: its own authority beside the image's."""

from __future__ import annotations

from collections.abc import AsyncIterator

from coldframe.host.egress.subject import hashed_name
from coldframe.host.rootfs import RootFiles
from coldframe.protocol.errors import FileError, PathNotFoundError

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""Read by curl, git, Go, GnuTLS and the system's pip."""
HASHED = f"/etc/ssl/certs/{hashed_name()}"
"""Found by OpenSSL, and so by Python."""
_MOST_BUNDLE = 8 << 20


class Trust:
    """The certificates in one sandbox's /etc/ssl/certs."""

    def __init__(self, files: RootFiles) -> None:
        self._files = files
        self._pem: bytes | None = None

    @property
    def added(self) -> bytes | None:
        """What has been added and not taken back."""
        return self._pem

    async def replace(self, pem: bytes) -> None:
        """Take back what another process had added; its key is no more. Raises FileError."""
        self._pem = pem
        await self.remove()

    async def add(self, pem: bytes) -> None:
        """Let the sandbox trust an authority. Twice is fine. Raises FileError."""
        if self._pem is not None:
            return
        before = await self._bundle()
        if before and not before.endswith(b"\n"):
            before += b"\n"
        await self._write(BUNDLE, before + pem)
        await self._write(HASHED, pem)
        self._pem = pem

    async def remove(self) -> None:
        """Take it back, whatever else has been added meanwhile. Raises FileError."""
        pem, self._pem = self._pem, None
        if pem is None:
            return
        now = await self._bundle()
        if pem in now:
            await self._write(BUNDLE, now.replace(pem, b""))
        try:
            await self._files.remove(HASHED)
        except PathNotFoundError:
            return

    async def _bundle(self) -> bytes:
        try:
            pieces = [one async for one in self._files.read(BUNDLE, length=_MOST_BUNDLE + 1)]
        except PathNotFoundError:
            return b""
        content = b"".join(pieces)
        if len(content) > _MOST_BUNDLE:
            raise FileError(f"{BUNDLE}: over {_MOST_BUNDLE} bytes")
        return content

    async def _write(self, path: str, content: bytes) -> None:
        async def whole() -> AsyncIterator[bytes]:
            yield content

        await self._files.write(path, whole(), mode=0o644, owner=(0, 0))
