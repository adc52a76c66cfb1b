"""The one refusal of the contract."""

from __future__ import annotations

import reprlib
from typing import Any

from coldframe.protocol.errors import ColdframeError, Side


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python writes no int of over 4,300 digits
            return f"an integer of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = _short.maxother = 80


class ContractError(ColdframeError, ValueError):
    """What was given may not be trained on; `rule` says which rule it breaks.

    `trial`, `field` and `value` name the offender; `value` is the very object that was found.
    """

    code = "contract_rejected"
    side = Side.CALLER

    def __init__(
        self, trial: str, field: str, value: object, problem: str, *, rule: str = ""
    ) -> None:
        self.trial, self.field, self.value = trial, field, value
        self.problem, self.rule = problem, rule
        super().__init__(f"{trial}: {field}: {problem}; found {_short.repr(value)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Let workers hand it on: an exception is otherwise made anew from its message alone."""
        return _again, (self.trial, self.field, self.value, self.problem, self.rule)


def _again(trial: str, field: str, value: object, problem: str, rule: str) -> ContractError:
    return ContractError(trial, field, value, problem, rule=rule)
