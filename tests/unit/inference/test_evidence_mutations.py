"""Every check of an answer is needed: taken away, a lie gets through as tokens, or breaks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coldframe.inference import evidence
from coldframe.trajectories.calls import Level
from tests.doubles.engine import Answer
from tests.integration.inference.test_faults import LIES

SOURCE = Path(evidence.__file__)


def answer() -> Answer:
    """Return an honest answer of three tokens."""
    content = [{"logprob": value} for value in (-0.5, -0.25, 0.0)]
    return {
        "prompt_token_ids": [300, 104, 105, 302],
        "choices": [
            {
                "message": {"role": "assistant", "content": "hello"},
                "token_ids": [256, 257, 310],
                "logprobs": {"content": content},
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
    }


def more_lies() -> Iterator[Callable[[Answer], Any]]:
    """Yield lies that only one check stands against."""

    def fewer_of_both(one: Answer) -> None:
        one["choices"][0]["token_ids"].pop()
        one["usage"]["completion_tokens"] = 2

    def no_count(one: Answer) -> None:
        one["usage"]["completion_tokens"] = None

    yield fewer_of_both
    yield no_count


LYING = [*(one.change for one in LIES.values()), *more_lies()]


def checks(tree: ast.Module) -> list[ast.If]:
    """Return every condition on what the engine gave, but for what was asked of it."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    return [one for one in found if "asked" not in ast.unparse(one.test)]


NUMBERS = range(len(checks(ast.parse(SOURCE.read_text()))))


def load(tree: ast.Module) -> ModuleType:
    made = ModuleType("mutant")
    made.__dict__["__name__"] = evidence.__name__
    exec(compile(ast.fix_missing_locations(tree), str(SOURCE), "exec"), made.__dict__)
    return made


def test_honest_answer_is_recorded_and_no_lie_is() -> None:
    """Else the mutants would prove nothing."""
    assert evidence.examine(answer(), Level.TOKENS).level is Level.TOKENS
    told = [_told(evidence, one) for one in LYING]
    assert all(one is not None and one[0] is not Level.TOKENS and one[1] for one in told)


@pytest.mark.parametrize("number", NUMBERS)
def test_check_that_is_removed_lets_a_lie_through(number: int) -> None:
    """Or lets one be recorded as less than it is, or by the name of another flaw."""
    tree = ast.parse(SOURCE.read_text())
    removed = checks(tree)[number]
    what = ast.unparse(removed.test)
    removed.test = ast.Constant(False)
    mutant = load(tree)

    assert any(_told(mutant, one) != _told(evidence, one) for one in LYING), what


def _told(module: ModuleType, change: Callable[[Answer], Any]) -> Any:
    given = answer()
    change(given)
    try:
        found = module.examine(given, Level.TOKENS)
    except Exception:  # noqa: BLE001 - without its check a lie may end in any way
        return None
    return found.level, found.flaws
