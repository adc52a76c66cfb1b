"""Where this machine's own apt, pip and npm fetch packages, as rules.

The tools themselves are asked, so that their files, their variables and their defaults count as
they do for them. A tool that is not installed has no rules.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from urllib.parse import urlsplit

from coldframe.host.egress.addresses import canonical, local_kind
from coldframe.protocol.network import NetworkRule, Preset

_KEPT_S = 600.0
_TIMEOUT_S = 30.0
_PORTS = {"http": 80, "https": 443}
_PIP_OPTIONS = frozenset({"index-url", "extra-index-url", "find-links"})
_PIP_DEFAULTS = (
    "import json; from pip._internal.models.index import PyPI as i; "
    "print(json.dumps([i.simple_url, 'https://' + i.file_storage_domain]))"
)
_kept: dict[Preset, tuple[float, tuple[NetworkRule, ...]]] = {}
_answers: dict[tuple[str, ...], tuple[float, str]] = {}
_asking: dict[tuple[str, ...], threading.Lock] = {}
_guard = threading.Lock()


def preset_rules(presets: Iterable[Preset]) -> tuple[NetworkRule, ...]:
    """Return the rules of presets. Blocks while tools are asked; answers are kept for minutes."""
    with ThreadPoolExecutor(len(_ADDRESSES)) as threads:  # each tool takes a second to begin
        found = list(threads.map(_rules_of, presets))
    return _joined(found)


def _rules_of(preset: Preset) -> tuple[NetworkRule, ...]:
    known = _kept.get(preset)
    if known is None or known[0] < time.monotonic():
        known = (time.monotonic() + _KEPT_S, tuple(_rules(_ADDRESSES[preset]())))
        _kept[preset] = known
    return known[1]


def cached_preset_rules(presets: Iterable[Preset]) -> tuple[NetworkRule, ...] | None:
    """Return the rules if no tool needs to be asked, else None."""
    now = time.monotonic()
    known = [_kept.get(preset, (0.0, ())) for preset in presets]
    return _joined(rules for _, rules in known) if all(until > now for until, _ in known) else None


def _joined(found: Iterable[tuple[NetworkRule, ...]]) -> tuple[NetworkRule, ...]:
    return tuple(dict.fromkeys(rule for rules in found for rule in rules))


def _rules(urls: Iterable[str]) -> Iterator[NetworkRule]:
    for url in urls:
        with contextlib.suppress(ValueError):  # a local file, or no URL at all
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
            if parts.hostname and port:
                host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
                yield NetworkRule.parse(f"{host}:{port}")
                yield from _private(parts.hostname, port)


def _private(host: str, port: int) -> Iterator[NetworkRule]:
    """Name the addresses of a mirror in a private network: no host's rule reaches those."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return
    for text in sorted({str(entry[4][0]) for entry in found}):
        with contextlib.suppress(ValueError):  # an address with a scope
            address = canonical(ip_address(text))
            local = local_kind(address, lambda _: False)
            if local is not None and local[1]:
                yield NetworkRule(cidr=str(address), ports=((port, port),))


def _ask(*command: str) -> str:
    """Return what a tool says; nothing when it fails or is not there. Kept for minutes."""
    with _guard:
        lock = _asking.setdefault(command, threading.Lock())
    with lock:
        known = _answers.get(command)
        if known is None or known[0] < time.monotonic():
            known = _answers[command] = (time.monotonic() + _KEPT_S, _say(*command))
        return known[1]


def _say(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd="/"
        )
        if ended.returncode == 0:
            return ended.stdout
    return ""


def _apt() -> Iterator[str]:
    yield from _ask("apt-get", "indextargets", "--format", "$(REPO_URI)").split()


def pip_options() -> dict[str, list[str]]:
    """Return pip's settings on this machine, the words of each by its name. Blocks."""
    pip = (sys.executable, "-m", "pip") if importlib.util.find_spec("pip") else ("pip",)
    settings = _ask(*pip, "config", "list")
    named: dict[str, list[str]] = {}
    for line in sorted(settings.splitlines(), key=_is_of_environment):
        key, _, value = line.partition("=")
        # The last one counts; as for pip, that is the environment's.
        named[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
    return named


def _pip() -> Iterator[str]:
    with ThreadPoolExecutor(1) as thread:
        defaults = thread.submit(_pip_defaults)
        named = {option: urls for option, urls in pip_options().items() if option in _PIP_OPTIONS}
    index, *files = defaults.result()
    yield from named.pop("index-url", [index])
    yield from files
    for urls in named.values():
        yield from urls


def _is_of_environment(line: str) -> bool:
    return line.startswith(":env:")


def _pip_defaults() -> list[str]:
    for python in (sys.executable, "python3"):
        answer = _ask(python, "-c", _PIP_DEFAULTS)
        if answer:
            return [str(url) for url in json.loads(answer)]
    return [""]


def npm_options() -> dict[str, object]:
    """Return npm's settings on this machine by their names. Blocks."""
    with contextlib.suppress(json.JSONDecodeError):
        settings = json.loads(_ask("npm", "config", "list", "--json") or "{}")
        if isinstance(settings, dict):
            return settings
    return {}


def _npm() -> Iterator[str]:
    for key, value in npm_options().items():
        if (key == "registry" or key.endswith(":registry")) and isinstance(value, str):
            yield value


_ADDRESSES = {"apt": _apt, "pip": _pip, "npm": _npm}
