"""Do the steps of a planned build: files are copied here, RUN is given away.

Each step that makes a layer is found again by a digest of everything that decides what it makes:
the layers below, the configuration, what is run, and the names, modes and contents of files.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from coldframe.images.base import BuildStep, Image, Progress, RunStep, StepResult
from coldframe.images.copying import Copy, LayerCopy, copy_digest, copy_stamp
from coldframe.images.indexes import PLACE, Settings, settings
from coldframe.images.mounts import Mount
from coldframe.images.plan import Origin, Planned, PlannedRun, line_named
from coldframe.images.residue import RESOLV, drop, drop_unchanged_resolver, has_resolver
from coldframe.images.sources import Context, ImageSource, Source
from coldframe.images.store import ImageStore, image_digest, stacked
from coldframe.images.users import resolve_owner
from coldframe.images.view import MergedView
from coldframe.images.writer import Metadata, TreeWriter
from coldframe.protocol.errors import CapabilityError, ImageError, NotExecutedError
from coldframe.protocol.models import ExecResult, Reason
from coldframe.protocol.network import NetworkPolicy

REPORT_S = 15.0
"""How often a step that runs long is reported."""

_TAIL_BYTES = 2000
_SCRIPT = "script"


@dataclass
class Steps:
    """What every step of one build needs."""

    store: ImageStore
    context: Context
    run_step: RunStep
    deadline_s: float
    """Of each RUN."""
    network: NetworkPolicy
    cached: bool
    progress: Progress
    stages: dict[int, Image] = field(default_factory=dict)
    """Stages that are done."""
    _settings: Settings | None = None

    async def do(self, image: Image, step: Planned) -> tuple[Image, str | None]:
        """Return the image with one more instruction applied, and the layer that it made.

        Raises:
            DockerfileError: it cannot be done; begins with file:line.
            BuildStepError: its command failed; begins with file:line.
        """
        layer = None
        with line_named(step.instruction):
            if step.copy is not None:
                layer = await self._copy(image, step)
            elif step.run is not None:
                layer = await self._run(image, step, step.run)
            elif step.instruction.keyword == "WORKDIR":
                layer = await asyncio.to_thread(self._workdir, image, step)
        layers = image.layers if layer is None else stacked(layer, *image.layers)
        return Image(image.name, image_digest(layers, step.config), layers, step.config), layer

    def _roots(self, image: Image) -> list[Path]:
        return [self.store.layer_root(digest) for digest in image.layers]

    def _source(self, origin: Origin) -> Source:
        if origin is None:
            return self.context
        if isinstance(origin, int):
            return ImageSource(self._roots(self.stages[origin]), f"stage {origin}")
        return ImageSource(self._roots(origin), f"image {origin.name!r}")

    async def _once(self, decides: Sequence[object], make: Callable[[], Awaitable[str]]) -> str:
        """Return the layer of a step, made now unless it is known."""
        key = hashlib.sha256(json.dumps(decides).encode("utf-8", "surrogateescape")).hexdigest()
        if not self.cached:
            layer = await make()
            await asyncio.to_thread(self.store.remember, key, layer)
            return layer
        async with self.store.step(key, lambda: self.progress("another build makes this step")):
            known = self.store.recall(key)
            if known is not None:
                self.progress("cached")
                return known
            layer = await make()
            await asyncio.to_thread(self.store.remember, key, layer)
            return layer

    # --- files ----------------------------------------------------------------------------

    async def _copy(self, image: Image, step: Planned) -> str:
        assert step.copy is not None
        source, request = self._source(step.copy.origin), step.copy.copy
        roots = self._roots(image)
        if step.copy.owner is not None:
            owner = await asyncio.to_thread(resolve_owner, MergedView(roots), step.copy.owner)
            request = replace(request, owner=owner)
        stamp = await asyncio.to_thread(copy_stamp, source, request)
        content = await asyncio.to_thread(copy_digest, source, request)

        async def make() -> str:
            return await asyncio.to_thread(self._copied, roots, source, request, stamp)

        return await self._once(["coldframe-copy-1", image.layers, content], make)

    def _copied(self, roots: list[Path], source: Source, request: Copy, stamp: str) -> str:
        with self._tree() as tree:
            count = LayerCopy(tree, roots).copy(source, request)
            if copy_stamp(source, request) != stamp:
                raise ImageError("its sources were written to while they were copied; build again")
            self.progress(f"copied {count} {'entry' if count == 1 else 'entries'}")
            return self.store.add_layer(tree)

    def _workdir(self, image: Image, step: Planned) -> str | None:
        roots = self._roots(image)
        path = os.fsencode(step.config.workdir)
        if roots and MergedView(roots).resolve(path).is_directory:
            return None
        uid, gid = resolve_owner(MergedView(roots), step.config.user)
        with self._tree() as tree:
            LayerCopy(tree, roots).make_directories(path, uid, gid)
            return self.store.add_layer(tree)

    @contextmanager
    def _tree(self) -> Iterator[Path]:
        with self.store.workspace() as work:
            tree = work / "tree"
            tree.mkdir(mode=0o755)
            yield tree

    # --- commands -------------------------------------------------------------------------

    async def _run(self, image: Image, step: Planned, run: PlannedRun) -> str:
        if not image.layers:
            raise step.instruction.refuse(
                "RUN needs a base image with files; FROM scratch has none"
            )
        network = self.network if run.networked else NetworkPolicy()
        decides = [
            "coldframe-run-4",
            image_digest(image.layers, step.config),
            [run.argv, run.command, run.script and run.script.hex()],  # each in a place of its own
            run.arguments,
            [await asyncio.to_thread(self._mounted, *one) for one in run.mounts],
            network.empty,  # not what it allows: who widens it wants the next line, not all anew
        ]
        return await self._once(decides, lambda: self._ran(image, step, run, network))

    def _mounted(self, mount: Mount, origin: Origin) -> list[object]:
        """Return what decides what a mount shows."""
        if mount.kind != "bind":
            return [asdict(mount)]
        return [asdict(mount), copy_digest(self._source(origin), _bound(mount))]

    async def _ran(
        self, image: Image, step: Planned, run: PlannedRun, network: NetworkPolicy
    ) -> str:
        told = await self._told(network)
        files = told.files if run.script is None else (*told.files, (_SCRIPT, run.script))
        above, hidden = await asyncio.to_thread(
            self._above, image, run, files, resolver=not network.empty
        )
        seen = replace(image, layers=stacked(*above, *image.layers), config=step.config)
        with self.store.workspace() as work:
            target = work / "upper"
            target.mkdir(mode=0o755)
            request = BuildStep(
                image=seen,
                argv=run.argv if run.script is None else (f"/{PLACE}/{_SCRIPT}",),
                command=run.command,
                env=tuple({**told.env, **dict(run.proxies), **_env(step, run)}.items()),
                workdir=step.config.workdir,
                user=step.config.user,
                deadline_s=self.deadline_s,
                network=network,
                target=target,
            )
            try:
                done = await self._watched(request)
            except NotExecutedError as error:
                raise step.instruction.failed(f"was not started: {error}") from error
            if not done.result.ok:
                raise step.instruction.failed(failure(done))
            return await asyncio.to_thread(self._kept, image, seen, target, hidden)

    def _kept(
        self, image: Image, seen: Image, target: Path, hidden: Sequence[tuple[bytes, ...]]
    ) -> str:
        """Add what a step wrote, without what it alone has seen."""
        roots = self._roots(image)
        for parts in hidden:
            drop(target, parts, MergedView(roots))
        drop_unchanged_resolver(target, self._roots(seen), roots)
        return self.store.add_layer(target)

    async def _told(self, network: NetworkPolicy) -> Settings:
        """Return what goes with a policy; the tools are asked once in a build."""
        if network.empty:
            return Settings()
        if self._settings is None:
            self._settings = await asyncio.to_thread(settings, network)
        return self._settings

    async def _watched(self, request: BuildStep) -> StepResult:
        """Run a step and say now and then that it still does."""
        watch = asyncio.create_task(self._report())
        try:
            done = await self.run_step(request)
        except CapabilityError as error:
            if request.network.empty:
                raise
            raise CapabilityError(f"{error}; to build without a network: --network none") from error
        finally:
            watch.cancel()
        for sentence in done.refusals:
            self.progress(f"the network policy {sentence}")
        return done

    async def _report(self) -> None:
        begun = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(REPORT_S)
            passed = asyncio.get_running_loop().time() - begun
            self.progress(f"still running after {passed:.0f} s; may take {self.deadline_s:g} s")

    # --- what one step sees ---------------------------------------------------------------

    def _above(
        self,
        image: Image,
        run: PlannedRun,
        files: Sequence[tuple[str, bytes]],
        *,
        resolver: bool,
    ) -> tuple[tuple[str, ...], list[tuple[bytes, ...]]]:
        """Make the layer that lies above the image while a step runs, if it needs one.

        Returns it, and the paths of which the step's own layer keeps nothing.
        """
        roots = self._roots(image)
        resolver = resolver and not has_resolver(roots)
        if not files and not run.mounts and not resolver:
            return (), []
        hidden: list[tuple[bytes, ...]] = []
        with self._tree() as tree:
            copy = LayerCopy(tree, roots)
            if files:
                hidden.append((PLACE.encode(),))
                for name, content in files:
                    request = Copy((), f"/{PLACE}/", mode="0755", files=((name, content),))
                    copy.copy(self.context, request)
            if resolver:
                directory, name = posixpath.split(RESOLV)
                copy.copy(self.context, Copy((), f"{directory}/", files=((name, b""),)))
            for mount, origin in run.mounts:
                place = MergedView([tree, *roots]).resolve(os.fsencode(mount.target))
                if not place.parts:
                    raise ImageError(f"RUN --mount: target={mount.target} is the root")
                hidden.append(place.parts)
                if mount.kind == "bind":
                    copy.copy(self._source(origin), _bound(mount))
                else:
                    copy.make_directories(os.fsencode(mount.target), mount.uid, mount.gid)
                    _empty(tree, place.path, mount)
            return (self.store.add_layer(tree),), hidden


def _bound(mount: Mount) -> Copy:
    return Copy((mount.source or ".",), mount.target)


def _empty(tree: Path, path: bytes, mount: Mount) -> None:
    """Let a directory of a layer hide what the image has in it."""
    with TreeWriter(tree) as writer:
        opaque = {"trusted.overlay.opaque": b"y"}
        writer.directory(path, Metadata(mount.mode, mount.uid, mount.gid, xattrs=opaque))


def _env(step: Planned, run: PlannedRun) -> dict[str, str]:
    return {**dict(run.arguments), **dict(step.config.env)}


def failure(done: StepResult) -> str:
    """Say how a step failed, with the end of what it printed (hostile text)."""
    how, remedy = _how(done.result), ""
    if done.refusals:
        how += f"; the network policy {'; '.join(done.refusals)}"
        # Last, below all that was printed; a host is the sandbox's word, and comes into no command.
        remedy = "\nallow a host with: --network presets --network HOST"
    result = done.result
    output = result.out.head + result.out.tail + result.err.head + result.err.tail
    if len(output) > _TAIL_BYTES:  # from the beginning of a line on, if there is one
        output = output[-_TAIL_BYTES:]
        output = output.partition(b"\n")[2] or output
    tail = output.decode("utf-8", "replace").strip()
    if not tail:
        return f"{how} and printed nothing{remedy}"
    return f"{how}:\n{tail}{remedy}" if "\n" in tail else f"{how}: {tail}{remedy}"


def _how(result: ExecResult) -> str:
    if result.reason is Reason.EXIT:
        return f"failed with exit code {result.exit_code}"
    if result.reason is Reason.DEADLINE:
        return f"did not end within {result.duration_s:.0f} s (give it longer with --deadline)"
    signal = f" (signal {result.signal})" if result.signal else ""
    return f"was ended by {result.reason.value}{signal}"
