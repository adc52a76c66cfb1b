"""What every model has: frozen, checked when it is made, nothing unknown."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

MIB = 1 << 20
GIB = 1 << 30


@lru_cache
def _every_field(model: type[BaseModel]) -> set[str]:
    """Shared by all models that have every field given, which a node keeps thousands of.

    None of them ever changes.
    """
    return set(model.model_fields)


class Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    @classmethod
    def whole(cls, **values: Any) -> Self:
        """Make one of values that fit, one for every field, in their order; nothing is checked.

        A tenth of the price of `model_construct`, which looks for defaults.
        """
        return cls._of(values, _every_field(cls))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without looking for what no model here has."""
        if deep:
            return super().model_copy(update=update, deep=True)
        changed, given = update or {}, self.model_fields_set
        if not changed.keys() <= given:
            given = given | changed.keys()
        return self._of({**self.__dict__, **changed}, given)

    @classmethod
    def _of(cls, values: dict[str, Any], given: set[str]) -> Self:
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", values)
        object.__setattr__(made, "__pydantic_fields_set__", given)
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made


# What a caller asks for is taken as it is: True is no number of seconds, "2" no processors.
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def refuse_empty(name: str, given: str | int | None) -> None:
    """Raise ValueError for an empty text where leaving it out means the default."""
    if given == "":
        raise ValueError(f"{name}: it is empty; leave it out for the default")
