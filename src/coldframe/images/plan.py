"""Fill in what can be known before anything runs: variables, sources, configuration.

So that a mistake in the last line is told at once, and not after ten minutes of RUN.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from coldframe.images.arguments import PROXIES, Arguments
from coldframe.images.base import Image, ImageConfig
from coldframe.images.configure import DEFAULT_SHELL, configure, user
from coldframe.images.copying import Copy
from coldframe.images.dockerfile import Instruction, parse_trigger
from coldframe.images.ignore import Ignore
from coldframe.images.modes import is_mode
from coldframe.images.mounts import Mount, mounts
from coldframe.images.sources import Context
from coldframe.images.stages import Stage, Stages
from coldframe.images.store import ImageStore
from coldframe.images.trees import NO_SPACE
from coldframe.images.unpack import DEFAULT_CONFIG
from coldframe.images.variables import WordError, expand
from coldframe.protocol.errors import (
    DockerfileError,
    ImageError,
    InvalidRequestError,
    NotExecutedError,
)

SCRATCH = Image("scratch", "", (), DEFAULT_CONFIG)
_LONGEST = 4095
_MOST_HELD = 1 << 24
_REMOTE = re.compile(r"(https?|ftp|git|ssh)://|git@|[^/]+\.git(#|$)", re.I)

Origin = Image | int | None
"""Where files are from: an image, a stage, or the build context."""


@dataclass(frozen=True)
class PlannedCopy:
    """A COPY or ADD line."""

    origin: Origin
    copy: Copy
    owner: str | None
    """Of --chown, still by name: an earlier RUN may make the user."""


@dataclass(frozen=True)
class PlannedRun:
    """A RUN line. Exactly one of `argv` and `command` is set."""

    argv: tuple[str, ...] | None
    command: str | None
    script: bytes | None
    """A here-document that names its own interpreter; `argv` is then empty."""
    arguments: tuple[tuple[str, str], ...]
    """Of the build, that the step sees as environment and the image does not keep."""
    proxies: tuple[tuple[str, str], ...]
    """The same, and they do not count for the cache."""
    mounts: tuple[tuple[Mount, Origin], ...]
    networked: bool


@dataclass(frozen=True)
class Planned:
    """An instruction with everything filled in that can be known before anything runs."""

    instruction: Instruction
    config: ImageConfig
    """As it is after the instruction."""
    copy: PlannedCopy | None = None
    run: PlannedRun | None = None


@dataclass(frozen=True)
class PlannedStage:
    """A stage of which everything is known but what its steps will make."""

    stage: Stage
    base: Image | None
    """None: its parent stage."""
    steps: tuple[Planned, ...]
    config: ImageConfig
    arguments: Mapping[str, str]


class Planner:
    """Plans the stages of one Dockerfile, in order."""

    def __init__(
        self, store: ImageStore, context: Context, stages: Stages, given: Mapping[str, str]
    ) -> None:
        self._store, self._context = store, context
        self._stages, self._given = stages, given
        self._planned: dict[int, PlannedStage] = {}
        self._held = 0

    def plan(self, stage: Stage) -> PlannedStage:
        """Plan a stage; those that it needs are planned.

        Raises:
            DockerfileError: a line is refused; nothing has run.
        """
        if stage.parent is not None:
            parent = self._planned[stage.parent]
            base, config, inherited = None, parent.config, parent.arguments
        else:
            base = self.resolve(stage.start, stage.base)
            config, inherited = base.config, {}
        where = f"{stage.start.where} (ONBUILD of {stage.base})"
        triggers = [parse_trigger(text, where) for text in config.on_build]
        planner = _StagePlanner(self, stage, replace(config, on_build=()), inherited)
        steps = tuple(planner.step(line) for line in (*triggers, *stage.lines))
        planned = PlannedStage(stage, base, steps, planner.config, planner.arguments.values)
        self._planned[stage.index] = planned
        return planned

    def resolve(self, line: Instruction, name: str) -> Image:
        """Return the image that a line names, and hold its layers."""
        if name == "scratch":
            return SCRATCH
        try:
            return self._store.resolve(name)
        except (ImageError, InvalidRequestError) as error:
            raise line.refuse(str(error)) from error

    def origin(self, line: Instruction, reference: str, stage: Stage) -> Origin:
        """Return the stage or image that a COPY or a mount reads."""
        found = self._stages.find(reference, stage.index)
        if found is not None:
            return found
        if reference.isascii() and reference.isdigit():
            raise line.refuse(f"--from={reference}: there is no such stage before this one")
        return self.resolve(line, reference)

    def hold(self, size: int) -> None:
        """Count what here-documents become. Raises WordError when it is too much to hold."""
        self._held += size
        if self._held > _MOST_HELD:
            raise WordError(f"all here-documents together become more than {_MOST_HELD} characters")

    def scope(self, inherited: Mapping[str, str]) -> Arguments:
        """Begin a stage's arguments."""
        return Arguments(self._given, self._stages.arguments, inherited)

    @property
    def proxies(self) -> Iterator[tuple[str, str]]:
        """What was given of the proxies' names."""
        return ((name, self._given[name]) for name in PROXIES if name in self._given)

    @property
    def context(self) -> Context:
        """The build context."""
        return self._context


class _StagePlanner:
    """Walks through one stage, keeping its configuration and arguments."""

    def __init__(
        self, planner: Planner, stage: Stage, config: ImageConfig, inherited: Mapping[str, str]
    ) -> None:
        self._planner, self._stage = planner, stage
        self.config = config
        self.arguments = planner.scope(inherited)
        self._has_cmd = False

    def step(self, line: Instruction) -> Planned:
        with line_named(line):
            # What ENV says counts more than any ARG, wherever it stands.
            env = {**self.arguments.values, **dict(self.config.env)}
            if line.keyword in ("COPY", "ADD"):
                return Planned(line, self.config, copy=self._copy(line, env))
            if line.keyword == "RUN":
                return Planned(line, self.config, run=self._run(line, env))
            if line.keyword == "ARG":
                self.arguments.declare(line, dict(self.config.env))
            elif line.keyword == "WORKDIR":
                path = absolute(expand(line.value, env, line.escape), self.config.workdir)
                self.config = replace(self.config, workdir=posixpath.normpath(path))
            else:
                self.config = configure(self.config, line, env)
                if line.keyword == "ENTRYPOINT" and not self._has_cmd:
                    # The base image's CMD was meant for its own entry point.
                    self.config = replace(self.config, cmd=())
                self._has_cmd = self._has_cmd or line.keyword == "CMD"
            return Planned(line, self.config)

    def _copy(self, line: Instruction, env: Mapping[str, str]) -> PlannedCopy:
        words = line.words if line.words is not None else tuple(line.value.split())
        files = []
        for heredoc in line.heredocs:
            text = heredoc.content
            if heredoc.expands:
                text = expand(text, env, line.escape, quotes=False)
            self._planner.hold(len(text))
            files.append((heredoc.name, text.encode("utf-8", "surrogateescape")))
            words = _without_heredoc(words)
        expanded = [expand(word, env, line.escape) for word in words]
        if len(expanded) + len(files) < 2 or not expanded or not all(expanded):
            raise line.refuse(f"{line.keyword} needs at least one source and a target")
        *sources, target = expanded
        origin: Origin = None
        if "from" in line.flags:
            origin = self._planner.origin(line, line.flags["from"], self._stage)
        if line.keyword == "ADD":
            for source in sources:
                _refuse_remote(line, source)
        if origin is None:
            for source in sources:
                self._planner.context.expand(source)
        owner = line.flags.get("chown")
        copy = Copy(
            tuple(sources),
            absolute(target, self.config.workdir),
            mode=_mode(line, env),
            files=tuple(files),
            unpacks=line.keyword == "ADD",
            excludes=_excludes(line, env),
            parents=line.flags.get("parents") == "true",
        )
        if owner is not None:
            owner = user(expand(owner, env, line.escape))
        return PlannedCopy(origin, copy, owner)

    def _run(self, line: Instruction, env: Mapping[str, str]) -> PlannedRun:
        network = line.flags.get("network", "default")
        if network not in ("default", "none"):
            raise line.refuse(
                f"RUN --network={network} is not supported; write default or none "
                "(what a build may reach is the builder's to say)"
            )
        argv, command, script = self._command(line)
        declared = self.arguments.values
        kept = {name for name, _ in self.config.env}
        proxies = [pair for pair in self._planner.proxies if pair[0] not in declared]
        mounted = []
        for written in mounts(line, env):
            mount = replace(written, target=absolute(written.target, self.config.workdir))
            origin: Origin = None
            if mount.origin:
                origin = self._planner.origin(line, mount.origin, self._stage)
            elif mount.kind == "bind":
                self._planner.context.expand(mount.source)
            mounted.append((mount, origin))
        return PlannedRun(
            argv,
            command,
            script,
            tuple((name, value) for name, value in declared.items() if name not in kept),
            tuple((name, value) for name, value in proxies if name not in kept),
            tuple(mounted),
            network != "none",
        )

    def _command(
        self, line: Instruction
    ) -> tuple[tuple[str, ...] | None, str | None, bytes | None]:
        """Return argument vector, command line and script: one of them."""
        if line.words is not None:
            if not line.words:
                raise line.refuse("RUN [] names no program")
            return line.words, None, None
        text = line.value
        if line.heredocs and not _without_heredoc(tuple(text.split())):
            # Nothing but here-documents: the first is the command, or a program by itself.
            first = line.heredocs[0]
            if first.text.startswith("#!"):
                return None, None, first.content.encode("utf-8", "surrogateescape")
            text = first.content
        else:
            text += "".join(f"\n{one.text}{one.name}" for one in line.heredocs)
        shell = self.config.shell or DEFAULT_SHELL
        return (None, text, None) if shell == DEFAULT_SHELL else ((*shell, text), None, None)


def _without_heredoc(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words without the first that begins a here-document."""
    for at, word in enumerate(words):
        if re.match(r"\d*<<-?[^<]", word):
            return words[:at] + words[at + 1 :]
    return words


def _refuse_remote(line: Instruction, source: str) -> None:
    if _REMOTE.match(source):
        raise line.refuse(
            f"ADD {source[:200]}: nothing is fetched here; write RUN with curl or git, "
            "or put the file into the build context"
        )


def _excludes(line: Instruction, env: Mapping[str, str]) -> tuple[str, ...]:
    patterns = tuple(expand(one, env, line.escape) for one in line.excludes)
    Ignore("\n".join(patterns), "--exclude")  # says what is wrong with them, with the line
    return patterns


def _mode(line: Instruction, env: Mapping[str, str]) -> str | None:
    if "chmod" not in line.flags:
        return None
    text = expand(line.flags["chmod"], env, line.escape)
    if not is_mode(text):
        raise line.refuse(f"--chmod={text} is no mode; write 0755, +x or u=rwX,go=rX")
    return text


def absolute(path: str, workdir: str) -> str:
    """Return a path of the image in full; a trailing slash stays, and says: a directory.

    Raises:
        WordError: it is empty.
    """
    if not path:
        raise WordError("the path is empty")
    if len(os.fsencode(path)) > _LONGEST:
        raise WordError(f"a path of more than {_LONGEST} bytes")
    joined = posixpath.join(workdir, path)
    if path.rsplit("/", 1)[-1] in (".", ".."):
        joined += "/"
    return joined


@contextmanager
def line_named(line: Instruction) -> Iterator[None]:
    """Turn what is wrong with a line into an error that begins with file and line."""
    try:
        yield
    except DockerfileError:
        raise
    except (ImageError, WordError, NotExecutedError) as error:
        raise line.refuse(str(error)) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        raise line.refuse(f"{error.filename!r}: {error.strerror}") from error
