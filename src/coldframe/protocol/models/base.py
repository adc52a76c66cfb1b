"""What every model has: frozen, checked when it is made, nothing unknown."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MIB = 1 << 20
GIB = 1 << 30


class Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


# What a caller asks for is taken as it is: True is no number of seconds, "2" no processors.
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def refuse_empty(name: str, given: str | int | None) -> None:
    """Raise ValueError for an empty text where leaving it out means the default."""
    if given == "":
        raise ValueError(f"{name}: it is empty; leave it out for the default")
