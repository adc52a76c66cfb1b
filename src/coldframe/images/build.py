"""Build images from Dockerfiles: what can be done here is done here, RUN is given away.

A RUN step is a layer that is cached by the image below it and everything that decides what
runs. COPY and WORKDIR layers need no such cache: the same content has the same digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coldframe.images import names
from coldframe.images.base import BuildStep, Image, ImageConfig, Progress, RunStep, quiet
from coldframe.images.copying import Context, Copy, LayerCopy
from coldframe.images.dockerfile import Instruction, decode, parse
from coldframe.images.store import ImageStore, image_digest
from coldframe.images.unpack import DEFAULT_CONFIG
from coldframe.images.users import resolve_owner
from coldframe.images.variables import WordError, expand, split_words
from coldframe.images.view import MergedView
from coldframe.protocol.errors import (
    DockerfileError,
    ImageError,
    ImageNotFoundError,
    NotExecutedError,
)
from coldframe.protocol.models import ExecResult, Reason

DEADLINE_S = 600.0
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class _Planned:
    """An instruction with everything filled in that can be known before anything runs."""

    instruction: Instruction
    config: ImageConfig
    """As it is after the instruction."""
    copy: Copy | None = None
    owner: str | None = None
    """Of --chown, still by name: an earlier RUN may make the user."""


async def build(
    store: ImageStore,
    name: str,
    context: Path,
    run_step: RunStep,
    *,
    dockerfile: Path | None = None,
    deadline_s: float = DEADLINE_S,
    cached: bool = True,
    progress: Progress = quiet,
) -> Image:
    """Build the Dockerfile of a context directory and give the image a name.

    Args:
        dockerfile: by default `Dockerfile` in the context.
        deadline_s: of each RUN step, in seconds.
        cached: whether RUN steps that ran before are taken from the store.
    Raises:
        DockerfileError: a line is refused (nothing has run) or failed; begins with file:line.
        ImageError: the context or the Dockerfile cannot be read.
        InvalidRequestError: not a name.
        StorageFullError: no space is left.
    """
    name = names.normalise(name)
    base, steps = await asyncio.to_thread(_prepare, store, context, dockerfile)
    builder = _Builder(store, Context(context), run_step, deadline_s, cached, progress)
    image = replace(base, name=name)
    for number, step in enumerate(steps, start=1):
        shown = f"[{number}/{len(steps)}] {step.instruction.keyword} {step.instruction.value}"
        progress(" ".join(shown.split())[:120])
        image = await builder.step(image, step)
    if not image.layers:
        raise ImageError(f"{context}: nothing was copied: an image needs at least one layer")
    return store.tag(name, image.layers, image.config)


def check(store: ImageStore, name: str, context: Path, *, dockerfile: Path | None = None) -> None:
    """Refuse what `build` would refuse before anything runs. Raises as `build` does."""
    names.normalise(name)
    _prepare(store, context, dockerfile)


def _prepare(
    store: ImageStore, context: Path, dockerfile: Path | None
) -> tuple[Image, list[_Planned]]:
    """Read, check and plan everything; nothing has run when this raises."""
    file = dockerfile or context / "Dockerfile"
    if not context.is_dir():
        raise ImageError(f"{context} is not a directory")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ImageError(f"{file}: {error.strerror}") from error
    instructions = parse(decode(raw, str(file)), str(file))
    base = _base(store, instructions[0])
    steps = list(_plan(instructions[1:], base.config, Context(context)))
    ignore = context / ".dockerignore"
    if ignore.exists() and any(step.copy for step in steps):
        raise DockerfileError(f"{ignore}:1: .dockerignore is not supported yet; remove the file")
    return base, steps


def _base(store: ImageStore, instruction: Instruction) -> Image:
    words = instruction.value.split()
    if len(words) == 3 and words[1].upper() == "AS":
        words = words[:1]
    if len(words) != 1 or "$" in words[0]:
        raise instruction.refuse(f"FROM {instruction.value} is not supported yet; write FROM NAME")
    if words[0] == "scratch":
        return Image("scratch", "", (), DEFAULT_CONFIG)
    try:
        return store.resolve(words[0])
    except ImageNotFoundError as error:
        raise instruction.refuse(str(error)) from error


# --- before anything runs -------------------------------------------------------------------


def _plan(
    instructions: tuple[Instruction, ...], config: ImageConfig, context: Context
) -> Iterator[_Planned]:
    for instruction in instructions:
        with _line_named(instruction):
            env = dict(config.env)
            if instruction.keyword == "ENV":
                env.update(_env(instruction.value, env))
                config = replace(config, env=tuple(env.items()))
                yield _Planned(instruction, config)
            elif instruction.keyword == "WORKDIR":
                path = _absolute(expand(instruction.value, env), config.workdir)
                config = replace(config, workdir=posixpath.normpath(path))
                yield _Planned(instruction, config)
            elif instruction.keyword == "USER":
                config = replace(config, user=_user(expand(instruction.value, env)))
                yield _Planned(instruction, config)
            elif instruction.keyword == "COPY":
                yield _plan_copy(instruction, config, env, context)
            else:
                if instruction.words == ():
                    raise instruction.refuse("RUN [] names no program")
                yield _Planned(instruction, config)


def _plan_copy(
    instruction: Instruction, config: ImageConfig, env: dict[str, str], context: Context
) -> _Planned:
    words = instruction.words if instruction.words is not None else instruction.value.split()
    expanded = [expand(word, env) for word in words]
    if len(expanded) < 2 or not all(expanded):
        raise instruction.refuse("COPY needs at least one source and a target")
    *sources, target = expanded
    for source in sources:
        context.expand(source)
    mode = None
    if "chmod" in instruction.flags:
        text = expand(instruction.flags["chmod"], env)
        if not re.fullmatch(r"[0-7]{3,4}", text):
            raise instruction.refuse(f"--chmod={text} is not supported yet; write it in octal")
        mode = int(text, 8)
    owner = instruction.flags.get("chown")
    return _Planned(
        instruction,
        config,
        Copy(tuple(sources), _absolute(target, config.workdir), mode=mode),
        None if owner is None else _user(expand(owner, env)),
    )


def _env(line: str, env: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `A=b C="d e"` or of the old form `A the rest`."""
    words = list(split_words(line))
    if "=" not in words[0]:
        name, value = [*line.split(None, 1), ""][:2]
        if not value.strip():
            raise WordError(f"ENV {name} has no value; write ENV {name}=VALUE")
        yield name, expand(value.strip(), env)
        return
    for word in words:
        name, equals, value = word.partition("=")
        name = expand(name, env)
        if not equals or not name:
            raise WordError(f"{word!r}: write NAME=VALUE")
        yield name, expand(value, env)


def _absolute(path: str, workdir: str) -> str:
    if not path:
        raise WordError("the path is empty")
    joined = posixpath.join(workdir, path)
    if path.rsplit("/", 1)[-1] in ("", ".", ".."):
        joined += "/"
    return joined


def _user(text: str) -> str:
    if not re.fullmatch(r"[^\s:]+(:[^\s:]+)?", text):
        raise WordError(f"{text!r} is not USER or USER:GROUP")
    return text


@contextmanager
def _line_named(instruction: Instruction) -> Iterator[None]:
    """Turn what is wrong with a line into an error that begins with file and line."""
    try:
        yield
    except DockerfileError:
        raise
    except (ImageError, WordError, NotExecutedError) as error:
        raise instruction.refuse(str(error)) from error


# --- running --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Builder:
    store: ImageStore
    context: Context
    run_step: RunStep
    deadline_s: float
    cached: bool
    progress: Progress

    async def step(self, image: Image, step: _Planned) -> Image:
        """Return the image with one more instruction applied."""
        layer = None
        with _line_named(step.instruction):
            if step.copy is not None:
                layer = await asyncio.to_thread(self._copy, image, step)
            elif step.instruction.keyword == "WORKDIR":
                layer = await asyncio.to_thread(self._workdir, image, step)
            elif step.instruction.keyword == "RUN":
                layer = await self._run(image, step)
        layers = image.layers if layer is None else (layer, *image.layers)
        return Image(image.name, image_digest(layers, step.config), layers, step.config)

    def _roots(self, image: Image) -> list[Path]:
        return [self.store.layer_root(digest) for digest in image.layers]

    def _copy(self, image: Image, step: _Planned) -> str:
        assert step.copy is not None
        roots = self._roots(image)
        request = step.copy
        if step.owner is not None:
            uid, gid = resolve_owner(MergedView(roots), step.owner)
            request = replace(request, uid=uid, gid=gid)
        with self.store.workspace() as work:
            tree = work / "tree"
            tree.mkdir(mode=0o755)
            count = LayerCopy(tree, roots).copy(self.context, request)
            self.progress(f"copied {count} {'entry' if count == 1 else 'entries'}")
            return self.store.add_layer(tree)

    def _workdir(self, image: Image, step: _Planned) -> str | None:
        roots = self._roots(image)
        path = os.fsencode(step.config.workdir)
        if roots and MergedView(roots).resolve(path).is_directory:
            return None
        uid, gid = resolve_owner(MergedView(roots), step.config.user)
        with self.store.workspace() as work:
            tree = work / "tree"
            tree.mkdir(mode=0o755)
            LayerCopy(tree, roots).make_directories(path, uid, gid)
            return self.store.add_layer(tree)

    async def _run(self, image: Image, step: _Planned) -> str:
        if not image.layers:
            raise step.instruction.refuse(
                "RUN needs a base image with files; FROM scratch has none"
            )
        key = _run_key(image, step)
        known = self.store.recall(key) if self.cached else None
        if known is not None:
            self.progress("cached")
            return known
        with self.store.workspace() as work:
            target = work / "upper"
            target.mkdir(mode=0o755)
            result = await self.run_step(self._request(image, step, target))
            if not result.ok:
                raise step.instruction.refuse(f"RUN {failure(result)}")
            layer = await asyncio.to_thread(self.store.add_layer, target)
        self.store.remember(key, layer)
        return layer

    def _request(self, image: Image, step: _Planned, target: Path) -> BuildStep:
        words = step.instruction.words
        return BuildStep(
            image=image,
            argv=words,
            command=step.instruction.value if words is None else None,
            env=step.config.env,
            workdir=step.config.workdir,
            user=step.config.user,
            deadline_s=self.deadline_s,
            target=target,
        )


def _run_key(image: Image, step: _Planned) -> str:
    words = step.instruction.words
    decides = [
        "coldframe-run-1",
        image_digest(image.layers, step.config),
        step.instruction.value if words is None else list(words),
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def failure(result: ExecResult) -> str:
    """Say how a step failed, with the end of what it printed (hostile text)."""
    output = (result.out.head + result.out.tail + result.err.head + result.err.tail)[-_TAIL_BYTES:]
    tail = output.decode("utf-8", "replace").strip()
    if result.reason is Reason.EXIT:
        how = f"failed with exit code {result.exit_code}"
    elif result.reason is Reason.DEADLINE:
        how = f"did not end within {result.duration_s:.0f} s"
    else:
        how = f"was ended by {result.reason.value}" + (
            f" (signal {result.signal})" if result.signal else ""
        )
    return f"{how}: {tail}" if tail else f"{how} and printed nothing"
