"""URLs that lead to one port of one sandbox for a while: `/p/TOKEN/`.

A token is signed, not kept: it says which port and until when, and its signature of 256 bits is
what nobody can guess. It is worth nothing once its sandbox has ended, which is asked at each use.
The key lies in the node's home, so that a token outlives a restart.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from coldframe.protocol.errors import CapabilityError, PortUrlInvalidError

log = logging.getLogger("coldframe.gateway")

PREFIX = "/p/"
_HEAD = struct.Struct(">QH")
_SIGNATURE = hashlib.sha256().digest_size
_SECRET = 32


@dataclass(frozen=True)
class Ticket:
    """What a token is for."""

    sandbox_id: str
    port: int
    expires_at: int
    """Unix seconds."""


class Tickets:
    """Makes and reads tokens."""

    def __init__(self, home: Path) -> None:
        self._file = home / "ports.key"
        self._key: bytes | None = None
        self._revoked_file = home / "ports.revoked"
        self._revoked: dict[str, int] | None = None
        """By digest, when they would have expired: then they need not be known any more."""

    def issue(self, ticket: Ticket) -> str:
        """Return a token, of characters that a URL's path may have.

        Raises:
            CapabilityError: the home cannot be written.
        """
        told = _HEAD.pack(ticket.expires_at, ticket.port) + ticket.sandbox_id.encode("ascii")
        return _text(told + self._sign(told))

    def read(self, token: str) -> Ticket:
        """Return what a token is for.

        Raises:
            PortUrlInvalidError: it was not issued here, or its time is over; the same words.
        """
        invalid = PortUrlInvalidError(
            "this URL leads nowhere: unknown, expired, or of a sandbox that has ended"
        )
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise invalid from None
        told, signature = raw[:-_SIGNATURE], raw[-_SIGNATURE:]
        try:
            expected = self._sign(told)
        except CapabilityError as error:  # where the secret is, is not for strangers
            log.warning("%s", error)
            raise invalid from None
        if (
            _text(raw) != token
            or len(told) < _HEAD.size
            or not hmac.compare_digest(signature, expected)
        ):
            raise invalid
        expires_at, port = _HEAD.unpack_from(told)
        if time.time() >= expires_at or _digest(token) in self._known_revoked():
            raise invalid
        return Ticket(told[_HEAD.size :].decode("ascii"), port, expires_at)

    def revoke(self, token: str) -> None:
        """Let a token lead nowhere from now on, also after a restart.

        Raises:
            PortUrlInvalidError: it leads nowhere already.
            CapabilityError: the home cannot be written.
        """
        expires_at = self.read(token).expires_at
        now = time.time()
        known = self._known_revoked()
        kept = {digest: until for digest, until in known.items() if until > now}
        kept[_digest(token)] = expires_at
        lines = "".join(f"{digest} {until}\n" for digest, until in kept.items())
        draft = self._revoked_file.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(lines)
            draft.replace(self._revoked_file)
        except OSError as error:
            raise CapabilityError(f"{self._revoked_file} cannot be kept: {error}") from error
        self._revoked = kept

    def _known_revoked(self) -> dict[str, int]:
        if self._revoked is None:
            try:
                lines = self._revoked_file.read_text().splitlines()
            except FileNotFoundError:
                lines = []
            told = (line.split() for line in lines)
            self._revoked = {digest: int(until) for digest, until in told}
        return self._revoked

    def _sign(self, told: bytes) -> bytes:
        if self._key is None:
            self._key = _kept_secret(self._file)
        return hmac.digest(self._key, told, "sha256")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _kept_secret(file: Path) -> bytes:
    """Return the secret in a file that only its owner reads; whoever comes first makes it."""
    try:
        draft = file.with_suffix(f".{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as writer:
            writer.write(secrets.token_bytes(_SECRET))
            writer.flush()
            os.fsync(descriptor)  # a loss of power would else leave the name, and no secret
        try:
            os.link(draft, file)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        secret = file.read_bytes()
    except OSError as error:
        raise CapabilityError(f"{file} cannot be kept: {error}") from error
    if len(secret) != _SECRET:
        raise CapabilityError(
            f"{file} has {len(secret)} bytes instead of {_SECRET}: what it signs could be guessed; "
            "remove it, which ends the URLs of ports that were given out"
        )
    return secret
