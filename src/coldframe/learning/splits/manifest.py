"""A split, frozen: which tasks are in it, and enough of each to recognise it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coldframe.learning.files import canonical, digest_of, refuse_other, write_frozen
from coldframe.protocol import strict_json
from coldframe.protocol.errors import ColdframeError, Side


class SplitError(ColdframeError):
    """A split cannot be made or read; the message names the task or file."""

    code = "split_refused"
    side = Side.CALLER


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SplitTask(_Model):
    """One task of a split."""

    key: str
    name: str
    group: str
    digest: str
    """SHA-256 of the task, hex."""
    instruction: tuple[int, ...]
    """Sketch of what it asks; see `similarity`."""
    tests: tuple[int, ...]
    """Sketch of how it is graded."""


class SplitManifest(_Model):
    """One split and how it was made."""

    schema_version: Literal["coldframe.split/1"] = "coldframe.split/1"
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    by: str
    """What its groups are: `repository`, `template`, `source`, `time`, or other metadata."""
    seed: str
    cut: str | None = None
    """Of a split by time: where the later tasks begin."""
    shares: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    """Of all splits that were made together."""
    tasks: tuple[SplitTask, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of its canonical JSON, hex."""
        return digest_of(self.model_dump(mode="json"))


def write_manifests(manifests: Mapping[Path, SplitManifest]) -> None:
    """Freeze splits, each in a read-only file that holds its own digest; all of them or none.

    Raises:
        InvalidRequestError: a file exists with other content.
    """
    contents = {
        path: canonical({"digest": one.digest, "split": one.model_dump(mode="json")}) + b"\n"
        for path, one in manifests.items()
    }
    for path, content in contents.items():  # one of these beside one of others might overlap
        refuse_other(path, content)
    for path, content in contents.items():
        write_frozen(path, content)


def read_manifest(path: Path) -> SplitManifest:
    """Return a split that is what it was when it was frozen.

    Raises:
        SplitError: it cannot be read, is no manifest, or was changed.
    """
    try:
        content = strict_json.parse(path.read_bytes())
        manifest = SplitManifest.model_validate(content["split"])
        given = content["digest"]
    except OSError as error:
        raise SplitError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SplitError(f"{path}: no manifest of a split: {where}: {first['msg']}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SplitError(f"{path}: no manifest of a split") from error
    if given != manifest.digest:
        raise SplitError(f"{path}: was changed after it was frozen; make the split again")
    return manifest
