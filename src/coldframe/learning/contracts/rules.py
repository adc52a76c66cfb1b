"""Tables of named rules. A rule reports what breaks it; the first report refuses the subject.

A rule looks at one thing and skips what another rule answers for, so that none hides the absence
of another: the tests take each away in turn and see what then gets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from coldframe.learning.contracts.errors import ContractError

S = TypeVar("S")
Breaches = Iterator[tuple[str, object, str]]
"""Field, the value found there, what is wrong with it."""


class Rules(Generic[S]):
    """The rules for one kind of subject, in the order in which they are applied.

    Each is named by its function and stated by that function's docstring.
    """

    def __init__(self) -> None:
        self.table: dict[str, Callable[[S], Breaches]] = {}

    def __call__(self, rule: Callable[[S], Breaches]) -> Callable[[S], Breaches]:
        """Add a rule; used as a decorator."""
        self.table[rule.__name__] = rule
        return rule

    def enforce(self, trial: str, subject: S) -> None:
        """Apply every rule.

        Raises:
            ContractError: of the first that is broken.
        """
        for name, rule in self.table.items():
            for field, value, problem in rule(subject):
                raise ContractError(trial, field, value, problem, rule=name)


def not_all(values: object, kind: type, field: str) -> Breaches:
    """Report what is no list, or in it of another kind."""
    if not isinstance(values, list | tuple):
        yield field, values, "is no list"
        return
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            yield f"{field}[{index}]", value, f"is no {kind.__name__}"
