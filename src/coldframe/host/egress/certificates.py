"""A certificate authority for one sandbox, by which the node ends TLS in a host's place.

Made when a policy first needs one, held in memory alone, and trusted by that sandbox alone.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coldframe.host.egress.subject import SUBJECT

_BEFORE, _VALID = timedelta(days=1), timedelta(days=365)
_MOST_HOSTS = 256


class Authority:
    """Signs certificates for the hosts that a sandbox has credentials for."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name(SUBJECT)
        builder = _builder(name, name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_key_usage(signs=True), True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(Encoding.PEM)
        """What the sandbox is to trust."""
        self.context_for = lru_cache(_MOST_HOSTS)(self._context)

    def _context(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        # Names of over 64 characters are no common names; the alternative name is what counts.
        builder = _builder(_name(host[:64]), self._certificate.subject, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(usage, False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, False)
        chain = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with _in_memory(secret + chain) as path:
            context.load_cert_chain(path)
        return context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _BEFORE).not_valid_after(now + _VALID)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path of a file that is on no disk: the ssl module reads keys by path alone."""
    fd = os.memfd_create("coldframe-key", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
