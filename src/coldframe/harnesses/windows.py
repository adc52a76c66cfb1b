"""What of an output the model is shown: named rules with versions.

A trainer must be able to say what the policy saw, so a rule never changes under its name: a
new behaviour is a new version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Text as it is shown, and how much of it is not."""

    text: str
    rule: str
    omitted_characters: int = 0


HEAD_TAIL_10K = "head_tail_10k@2"
WHOLE = "whole@1"
"""Nothing is left out: what the harness itself says."""


def head_tail_10k(text: str, not_kept: int = 0) -> Window:
    """Show text of fewer than 10,000 characters whole, else 5,000 of each end.

    Between them stands a line that says how many characters are left out.

    Args:
        not_kept: bytes of the output that nobody has kept, from its middle. They count as so many
            characters: what they were is not known.
    """
    if len(text) < 10_000:
        return Window(text, HEAD_TAIL_10K, not_kept)
    omitted = len(text) - 10_000 + not_kept
    shown = f"{text[:5_000]}\n[{omitted} characters omitted]\n{text[-5_000:]}"
    return Window(shown, HEAD_TAIL_10K, omitted)


RULES: dict[str, Callable[[str, int], Window]] = {HEAD_TAIL_10K: head_tail_10k}
