"""What ENV, USER, LABEL, CMD, HEALTHCHECK and their like change in an image's configuration."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace

from coldframe.images.base import Healthcheck, ImageConfig
from coldframe.images.dockerfile import Instruction, json_words, parse_trigger
from coldframe.images.variables import WordError, expand, split_words

_MOST_NAMES = 4096
_MOST_PAIRS = 1 << 20
"""Characters; the kernel gives a program 2 MiB of arguments and environment at most."""

DEFAULT_SHELL = ("/bin/sh", "-c")
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?", re.I)
_USER = re.compile(r"[^\s:]+(:[^\s:]+)?")
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_AUTHORS = "org.opencontainers.image.authors"


def configure(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    """Return the configuration after an instruction that changes nothing else.

    `env` is what variables stand for. ENTRYPOINT leaves CMD alone: whether it is the base
    image's is the caller's to know.

    Raises:
        WordError: the line is not well formed.
        DockerfileError: an ONBUILD holds what it may not.
    """
    change = _CHANGES[line.keyword]
    return change(config, line, env)


def command_line(config: ImageConfig, line: Instruction) -> tuple[str, ...]:
    """Return the argument vector of an exec form, or of a command line for the shell."""
    if line.words is not None:
        return line.words
    return (*(config.shell or DEFAULT_SHELL), line.value)


def user(text: str) -> str:
    """Return `user[:group]` as it is. Raises WordError if it is not that."""
    if not _USER.fullmatch(text):
        raise WordError(f"{text!r} is not USER or USER:GROUP")
    return text


def _env(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    # All values are those from before the line.
    changed = dict(_pairs(line, env))
    return replace(config, env=bounded({**dict(config.env), **changed}))


def _label(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    changed = dict(_pairs(line, env))
    return replace(config, labels=bounded({**dict(config.labels), **changed}))


def bounded(pairs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs. Raises WordError when they are more than a program can be given."""
    if len(pairs) > _MOST_NAMES:
        raise WordError(f"more than {_MOST_NAMES} names")
    size = sum(len(name) + len(value) for name, value in pairs.items())
    if size > _MOST_PAIRS:
        raise WordError(f"all values together have {size} characters; {_MOST_PAIRS} are the most")
    return tuple(pairs.items())


def _pairs(line: Instruction, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `A=b C="d e"` or of the old form `A the rest`."""
    words = list(split_words(line.value, line.escape))
    if "=" not in words[0]:
        name, value = [*line.value.split(None, 1), ""][:2]
        if not value.strip():
            raise WordError(
                f"{line.keyword} {name} has no value; write {line.keyword} {name}=VALUE"
            )
        yield expand(name, env, line.escape), expand(value.strip(), env, line.escape)
        return
    for word in words:
        name, equals, value = word.partition("=")
        name = expand(name, env, line.escape)
        if not equals or not name:
            raise WordError(f"{word!r}: write NAME=VALUE")
        yield name, expand(value, env, line.escape)


def _user(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    return replace(config, user=user(expand(line.value, env, line.escape)))


def _cmd(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    del env  # the shell that runs it replaces variables
    return replace(config, cmd=command_line(config, line))


def _entrypoint(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    del env
    return replace(config, entrypoint=command_line(config, line))


def _shell(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    del env
    if not line.words:
        raise WordError('write SHELL ["PROGRAM", "ARGUMENT"...]')
    return replace(config, shell=() if line.words == DEFAULT_SHELL else line.words)


def _expose(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    ports = dict.fromkeys(config.exposed_ports)
    for word in expand(line.value, env, line.escape).split():
        match = _PORTS.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if match is None or not 1 <= first <= last <= 65535:
            raise WordError(f"{word!r} is no port: write 80, 80/udp or 8000-8010")
        span = str(first) if first == last else f"{first}-{last}"
        ports[f"{span}/{(match[3] or 'tcp').lower()}"] = None
    return replace(config, exposed_ports=tuple(ports))


def _volume(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    words = line.words if line.words is not None else line.value.split()
    paths = [expand(word, env, line.escape) for word in words]
    if not paths or not all(paths):
        raise WordError("VOLUME names no path")
    return replace(config, volumes=tuple(dict.fromkeys((*config.volumes, *paths))))


def _stop_signal(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    text = expand(line.value, env, line.escape)
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    known = re.fullmatch(r"[0-9]{1,2}", text) and 1 <= int(text) <= signal.SIGRTMAX
    if not known and name not in signal.Signals.__members__:
        raise WordError(f"{text!r} is no signal: write a name (SIGTERM) or a number")
    return replace(config, stop_signal=text if known else name)


def _maintainer(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    del env
    return replace(config, labels=tuple({**dict(config.labels), _AUTHORS: line.value}.items()))


def _on_build(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    del env
    text = line.value + "".join(f"\n{one.text}{one.name}" for one in line.heredocs)
    parse_trigger(text, line.where, line.escape)
    return replace(config, on_build=(*config.on_build, text))


# --- HEALTHCHECK ----------------------------------------------------------------------------


def _healthcheck(config: ImageConfig, line: Instruction, env: Mapping[str, str]) -> ImageConfig:
    del env
    kind, rest = [*line.value.split(None, 1), ""][:2]
    if kind.upper() == "NONE":
        if rest or line.flags:
            raise WordError("HEALTHCHECK NONE takes nothing else")
        return replace(config, healthcheck=None)
    if kind.upper() != "CMD" or not rest:
        raise WordError("write HEALTHCHECK [OPTIONS] CMD COMMAND, or HEALTHCHECK NONE")
    words = json_words(rest) if rest.startswith("[") else None
    argv = (*(config.shell or DEFAULT_SHELL), rest) if words is None else words
    if not argv:
        raise WordError("HEALTHCHECK CMD [] names no program")
    options = {f"{name.replace('-', '_')}_s": _seconds(name, text) for name, text in _times(line)}
    retries = _retries(line.flags.get("retries", "0")) or Healthcheck.retries
    return replace(config, healthcheck=Healthcheck(argv, retries=retries, **options))


def _times(line: Instruction) -> Iterator[tuple[str, str]]:
    yield from ((name, text) for name, text in line.flags.items() if name != "retries")


def _seconds(name: str, text: str) -> float:
    pieces = _DURATION.findall(text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in pieces)
    whole = "".join(number + unit for number, unit in pieces) == text
    if text == "0" or (whole and pieces and seconds == 0):
        if name == "start-period":
            return 0.0
    elif whole and pieces and 1e-3 <= seconds <= 365 * 86400:
        return seconds
    raise WordError(f"--{name}={text} is no duration of 1 ms or more; write 30s or 1m30s")


def _retries(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise WordError(f"--retries={text} is no number")
    return int(text)


_CHANGES = {
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "ENV": _env,
    "EXPOSE": _expose,
    "HEALTHCHECK": _healthcheck,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "ONBUILD": _on_build,
    "SHELL": _shell,
    "STOPSIGNAL": _stop_signal,
    "USER": _user,
    "VOLUME": _volume,
}
