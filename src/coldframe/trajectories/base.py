"""What the parts of a trajectory are made of: frozen models, and bytes by their digest."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

DIGEST = re.compile(r"(?:[a-z0-9]+[:-])?[0-9a-f]{32,128}")
"""Of weights, say: with or without `sha256:` or the like before it."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Model(BaseModel):
    """Frozen, and refuses fields that it does not know; bytes are base64 in JSON."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


class BlobRef(Model):
    """Bytes that lie in the store under `sha256`."""

    sha256: Sha256
    bytes: int = Field(ge=0)


class OutputRef(Model):
    """One output stream: the whole by length and digest, and what of it was stored."""

    total_bytes: int = Field(ge=0)
    sha256: Sha256
    """Of the whole stream, as the runtime saw it."""
    stored: BlobRef
    """Equal to the whole when `complete`; else head, a line that says what is missing, tail."""
    complete: bool
    redacted: bool = False
    """A secret was taken out of what is stored; `complete` is then false."""
