"""What apt, pip and npm are told while a step runs, so that they ask where this machine's do.

Addresses without user name and password, and whom this machine trusts: environment and files
of the step alone, of which the image keeps nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.host.egress.presets import npm_options, pip_options, preset_rules
from coldframe.images.bootstrap import without_passwords
from coldframe.images.sources import read_small
from coldframe.protocol.network import NetworkPolicy

PLACE = ".coldframe"
"""A directory at the root of what a step sees."""

_TRUST = f"/{PLACE}/ca.crt"
_APT = f"/{PLACE}/apt.conf"
_MOST_TRUST = 8 << 20
_TRUSTING = (
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
)


@dataclass(frozen=True)
class Settings:
    """For one step."""

    env: dict[str, str] = field(default_factory=dict)
    """The image's own environment counts more."""
    files: tuple[tuple[str, bytes], ...] = ()
    """Names in PLACE, and contents."""


def settings(policy: NetworkPolicy) -> Settings:
    """Return what goes with a network policy. Blocks while the tools are asked.

    Raises:
        ImageError: the file of whom this machine trusts cannot be read.
    """
    if policy.empty:
        return Settings()
    env: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []
    preset_rules(policy.presets)  # asks every tool at once; the policy will want them as well
    options = pip_options()
    trusted = _trusted(options)
    if trusted is not None:
        files.append(("ca.crt", trusted))
        env |= dict.fromkeys(_TRUSTING, _TRUST)
        if "apt" in policy.presets:
            env["APT_CONFIG"] = _APT
            files.append(("apt.conf", f'Acquire::https::CAInfo "{_TRUST}";\n'.encode()))
    if "pip" in policy.presets:
        env |= dict(_pip(options))
    if "npm" in policy.presets:
        registry = npm_options().get("registry")
        if isinstance(registry, str) and registry.startswith("http"):
            env["npm_config_registry"] = without_passwords(registry)
    return Settings(env, tuple(files))


def _trusted(pip: Mapping[str, list[str]]) -> bytes | None:
    """Return the certificates of whom this machine says that it trusts, or pip's; None: neither."""
    for path in (ssl.get_default_verify_paths().cafile, *pip.get("cert", ())):
        content = read_small(Path(path), _MOST_TRUST) if path else None
        if content is not None:
            return content
    return None


def _pip(options: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    for index in _reachable(options.get("index-url", ())):
        yield "PIP_INDEX_URL", index
        yield "UV_DEFAULT_INDEX", index  # uv asks where pip does
    if others := " ".join(_reachable(options.get("extra-index-url", ()))):
        yield "PIP_EXTRA_INDEX_URL", others
    if "trusted-host" in options:
        yield "PIP_TRUSTED_HOST", " ".join(options["trusted-host"])


def _reachable(urls: Iterable[str]) -> Iterator[str]:
    """Yield the addresses that are no files of this machine."""
    yield from (without_passwords(url) for url in urls if url.startswith(("http://", "https://")))
