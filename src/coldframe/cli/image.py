"""`coldframe image`: make, import, list and remove images."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group

if TYPE_CHECKING:
    from coldframe.images.base import HistoryEntry, Image, ImageConfig
    from coldframe.images.store import ImageRecord, ImageStore, Removal

app = group()

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="repository[:tag], for example debian:bookworm.")
]


@app.command()
def bootstrap(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="debian:SUITE (debian:bookworm), or busybox.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Make it anew if it is there.")] = False,
    as_json: flags.Json = False,
) -> None:
    """Make a base image from Debian's packages; nothing to do if it is there already.

    The mirror, proxy and passwords are those of this machine's apt. debian:SUITE holds a
    minimal Debian with git, python3, procps and ca-certificates; it needs mmdebstrap and takes
    about half a minute. busybox holds one static program and takes no time.
    """
    from coldframe.images.bootstrap import bootstrap as make

    with _store() as store:
        _show_image(store, make(store, name, progress=_progress, force=force), as_json)


@app.command("import")
def import_(
    name: _Name,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="ROOTFS", help="A tar archive (plain, gzip, xz, zstd) or a directory."
        ),
    ],
    as_json: flags.Json = False,
) -> None:
    """Import a root file system as an image of one layer.

    Owners are kept by number (0 to 65535). Device nodes under dev/ are left out. An archive
    that would write outside of its own tree is refused, and nothing of it is kept.

    To bring an image from Docker: docker export CONTAINER > rootfs.tar
    """
    from coldframe.images.unpack import import_image

    with _store() as store:
        _show_image(store, import_image(store, name, source, progress=_progress), as_json)


@app.command()
def build(
    context: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="What COPY reads from.")],
    name: Annotated[str, typer.Option("--tag", "-t", metavar="NAME", help="Name of the result.")],
    dockerfile: Annotated[
        Path | None, typer.Option("--file", "-f", help="Default: DIRECTORY/Dockerfile.")
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A value for ARG; repeatable."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The stage to build, by name or number; default: the last.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(help="What RUN may reach: rules, presets (the default), public or none."),
    ] = None,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds for each RUN.")] = 600.0,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Do every step, also those that were done before.")
    ] = False,
    as_json: flags.Json = False,
) -> None:
    """Build an image from a Dockerfile.

    RUN steps run in sandboxes that reach this machine's own package indexes and nothing else,
    unless --network says otherwise. Each step is a cached layer: a second build does nothing.
    What cannot be honoured is refused, with file and line, before anything runs. Exit code: 0
    built, 1 a RUN or the platform failed, 2 a line is refused.
    """
    from coldframe.images.build import BuildOptions, check
    from coldframe.node.node import Node
    from coldframe.protocol.network import network_policy

    policy = network_policy("none" if network == ["none"] else network or "presets")
    options = BuildOptions(dockerfile, dict(map(_build_argument, build_arg or ())), target)
    with _store() as store:
        check(store, name, context, options=options)  # a bad line needs no node

    async def run() -> Image:
        async with Node() as node:
            return await node.build_image(
                name,
                context,
                dockerfile=dockerfile,
                build_args=options.arguments,
                target=target,
                network=policy,
                deadline_s=deadline,
                cached=not no_cache,
                progress=_progress,
            )

    image = asyncio.run(run())
    with _store() as store:
        _show_image(store, image, as_json)


@app.command()
def alias(
    words: Annotated[
        list[str],
        typer.Argument(metavar="NAME TARGET | ls | rm NAME...", help="Names, or digests."),
    ],
    as_json: flags.Json = False,
) -> None:
    """Let a name stand for an image of the store, as in FROM python:3.11-slim.

    An image that has the name itself comes first. `ls` lists the table, those included that
    are known without it; `rm` forgets names.
    """
    from coldframe.images.aliases import BUILT_IN

    with _store() as store:
        if words[0] == "ls" and len(words) == 1:
            table = store.aliases.table()
            if as_json:
                print(json.dumps({**BUILT_IN, **table}))
                return
            rows = [(one, to, "") for one, to in table.items()]
            rows += [(one, to, "built in") for one, to in BUILT_IN.items() if one not in table]
            print(render.table(("NAME", "TARGET", ""), rows))
        elif words[0] == "rm" and len(words) > 1:
            removed = [store.aliases.remove(name) for name in dict.fromkeys(words[1:])]
            print(json.dumps(removed) if as_json else f"removed {', '.join(removed)}")
        elif words[0] not in ("ls", "rm") and len(words) == 2:
            name, target = store.aliases.add(*words)
            print(json.dumps({name: target}) if as_json else f"{name} stands for {target}")
            if not any(target in (one.name, one.digest) for one in store.list()):
                _progress(f"{target} is not in the store yet")
        else:
            raise typer.BadParameter("write NAME TARGET, ls, or rm NAME...")


@app.command("ls")
def list_(as_json: flags.Json = False) -> None:
    """List images: name, digest, size and age. Layers that images share count in each."""
    with _store() as store:
        records = store.list()
    if as_json:
        print(json.dumps([_plain(record) for record in records]))
        return
    rows = [
        (
            record.name,
            record.digest[:12],
            str(len(record.layers)),
            _size(record.size_bytes),
            _age(time.time() - record.created_at),
        )
        for record in records
    ]
    render.listing(
        ("NAME", "DIGEST", "LAYERS", "SIZE", "AGE"),
        rows,
        "no images yet; begin with: coldframe image bootstrap debian:bookworm",
    )


@app.command()
def rm(
    images: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names, or digests (every name of it).")
    ],
    as_json: flags.Json = False,
) -> None:
    """Remove images by name, and the layers that no other image needs.

    Sandboxes that run on an image go on unharmed: its layers are kept until they have ended,
    and `coldframe gc` removes them then.
    """
    with _store() as store:
        for name in images:
            store.inspect(name)  # nothing is removed when one of them is wrong
        removals = [store.remove(name) for name in dict.fromkeys(images)]
    if as_json:
        print(json.dumps([asdict(removal) for removal in removals]))
        return
    for removal in removals:
        print(_removal(removal))


@app.command()
def inspect(
    image: Annotated[str, typer.Argument(metavar="NAME", help="Name or digest.")],
    as_json: flags.Json = False,
) -> None:
    """Show an image's configuration, history (oldest first) and layers (top first)."""
    with _store() as store:
        record = store.inspect(store.resolve(image).name)  # an alias shows what it stands for
        paths = [str(store.layer_root(digest)) for digest in record.layers]
    if as_json:
        print(json.dumps({**_plain(record), "layer_paths": paths}))
        return
    config = record.config
    lines = [
        f"name     {record.name}",
        f"digest   {record.digest}",
        f"size     {_size(record.size_bytes)}",
        f"workdir  {config.workdir}",
        f"user     {config.user}",
        *(f"env      {key}={value}" for key, value in config.env),
        *_more(config),
        *(f"history  {_history(entry)}" for entry in record.history),
        *(f"layer    {path}" for path in paths),
    ]
    print("\n".join(render.safe(line) for line in lines))


# --- inside ---------------------------------------------------------------------------------


@contextmanager
def _store() -> Iterator[ImageStore]:
    from coldframe.images.store import ImageStore
    from coldframe.node.settings import NodeSettings

    with ImageStore(NodeSettings.from_environment().home / "images") as store:
        yield store


def _progress(line: str) -> None:
    print(render.safe(line), file=sys.stderr, flush=True)


def _plain(record: ImageRecord) -> dict[str, Any]:
    plain = asdict(record)
    for key in ("env", "labels"):
        plain["config"][key] = dict(plain["config"][key])
    return plain


def _more(config: ImageConfig) -> Iterator[str]:
    """Say what most images do not have."""
    for name in ("entrypoint", "cmd", "shell"):
        if words := getattr(config, name):
            yield f"{name:<8} {json.dumps(words)}"
    if config.healthcheck is not None:
        yield f"healthcheck {json.dumps(asdict(config.healthcheck))}"
    yield from (f"label    {key}={value}" for key, value in config.labels)
    yield from (f"port     {port}" for port in config.exposed_ports)
    yield from (f"volume   {path}" for path in config.volumes)
    yield from (f"on build {text}" for text in config.on_build)
    if config.stop_signal is not None:
        yield f"stop     {config.stop_signal}"


def _history(entry: HistoryEntry) -> str:
    return entry.instruction + (f"  ({entry.resolved})" if entry.resolved else "")


def _build_argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f'--build-arg {text}: write NAME=VALUE, as in NAME="$NAME"')
    return name, value


def _show_image(store: ImageStore, image: Image, as_json: bool) -> None:
    record = store.inspect(image.name)
    if as_json:
        print(json.dumps(_plain(record)))
        return
    print(f"{record.name}  {record.digest[:12]}  {_size(record.size_bytes)}")


def _removal(removal: Removal) -> str:
    text = f"removed {', '.join(removal.names)}"
    if removal.layers:
        text += f"; {_layers(removal.layers)} with {_size(removal.size_bytes)} freed"
    if removal.in_use:
        text += (
            f"; {_layers(removal.in_use)} still in use, "
            "which `coldframe gc` removes when nothing runs on it any more"
        )
    return text


def _layers(layers: tuple[str, ...]) -> str:
    return f"{len(layers)} layer" + "s" * (len(layers) != 1)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"
