"""`coldframe sandbox cp`: files and trees, in and out.

What comes out of a sandbox is hostile: the SDK writes it by descriptor below the target, and
refuses names and links that lead out of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldframe.cli import flags
from coldframe.cli.clients import require_lasting_node
from coldframe.protocol.errors import InvalidRequestError, PathNotFoundError

if TYPE_CHECKING:
    from coldframe.client import Sandbox


@dataclass(frozen=True)
class _Copied:
    files: int
    """Members of a tree, or 1."""
    target: str


def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="PATH, or SANDBOX:/PATH.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="PATH, or SANDBOX:/PATH.")],
    as_json: flags.Json = False,
) -> None:
    """Copy a file or a directory into a sandbox or out of it.

    One side is SANDBOX:/PATH, with an id or a name; paths in sandboxes are absolute. Into a
    directory that is there, a copy keeps its name; otherwise TO is its new name. FROM that ends in
    `/.` means what is in a directory. A local name with a colon is written ./a:b. What is copied
    out belongs to you, loses setuid bits, and never leaves TO.
    """
    inside, outside = _remote(source), _remote(target)
    if (inside is None) == (outside is None):
        raise InvalidRequestError(
            "one side is in a sandbox and one is here: write for example "
            "coldframe sandbox cp file.txt box:/tmp/"
        )

    from coldframe.client import SandboxClient

    require_lasting_node()
    with SandboxClient() as client:
        if inside is not None:
            box, path = inside
            copied = _out(client.get_sandbox(box), path, target)
        else:
            assert outside is not None
            box, path = outside
            copied = _in(client.get_sandbox(box), source, path)
    if as_json:
        print(json.dumps({"files": copied.files, "target": copied.target}))


def _remote(word: str) -> tuple[str, str] | None:
    box, colon, path = word.partition(":")
    if not colon or not box or "/" in box:
        return None
    if not path.startswith("/"):
        raise InvalidRequestError(f"{word!r}: a path in a sandbox is absolute, such as {box}:/tmp")
    return box, path


def _in(sandbox: Sandbox, source: str, path: str) -> _Copied:
    local = Path(source)
    if not local.exists():
        raise InvalidRequestError(f"there is no {source!r} here")
    content = source.endswith("/.") or local.name == ""
    name = local.resolve().name
    into = _is_directory(sandbox, path)
    if not local.is_dir():
        where = f"{path.rstrip('/')}/{name}" if into or path.endswith("/") else path
        sandbox.files.upload(local, where)
        return _Copied(1, where)
    if path != "/" and not into and sandbox.files.exists(path):
        raise InvalidRequestError(f"{path!r} in the sandbox is a file, {source!r} a directory")
    where = f"{path.rstrip('/')}/{name}" if into and not content else path
    sandbox.files.mkdir(where)
    return _Copied(sandbox.files.upload_tree(local, where), where)


def _out(sandbox: Sandbox, path: str, target: str) -> _Copied:
    local = Path(target)
    content = path.endswith("/.")
    plain = path.removesuffix("/.").rstrip("/") or "/"
    name = plain.rpartition("/")[2]
    if name in {".", ".."}:
        raise InvalidRequestError(f"{path!r}: name what is to be copied")
    if not sandbox.files.exists(plain):
        raise PathNotFoundError(f"there is no {plain!r} in the sandbox")
    into = local.is_dir()
    if _is_directory(sandbox, plain):
        where = local / name if into and not content else local
        if where.exists() and not where.is_dir():
            raise InvalidRequestError(f"{str(where)!r} is a file, {plain!r} a directory")
        return _Copied(sandbox.files.download_tree(plain, where), str(where))
    if target.endswith("/") and not into:
        raise InvalidRequestError(f"there is no directory {target!r} here")
    where = local / name if into else local
    if where.is_dir():
        raise InvalidRequestError(f"{str(where)!r} is a directory, {plain!r} a file")
    sandbox.files.download(plain, where)
    return _Copied(1, str(where))


def _is_directory(sandbox: Sandbox, path: str) -> bool:
    try:
        return (sandbox.files.stat(path)).kind == "directory"
    except PathNotFoundError:
        return False
