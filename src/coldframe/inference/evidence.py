"""What of an engine's answer may be recorded. Checked on arrival; nothing is filled in.

Reads `token_ids` and `logprobs.content` in the choice, and `usage` as the engine's own count.
`prompt_token_ids` stand beside the choices (vLLM) or in the choice (SGLang).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from coldframe.trajectories.calls import Level

CAPTURE: dict[Level, dict[str, Any]] = {
    Level.TOKENS: {"logprobs": True, "top_logprobs": 0, "return_token_ids": True},
    Level.LOGPROBS: {"logprobs": True, "top_logprobs": 0},
    Level.TEXT: {},
}
"""What is asked of the engine in addition."""


@dataclass(frozen=True)
class Evidence:
    """What a call proves. Columns are None unless everything about them is right."""

    level: Level
    flaws: tuple[str, ...]
    prompt: list[int] | None = None
    completion: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def examine(answer: dict[str, Any], asked: Level) -> Evidence:
    """Return what an answer with one choice proves, up to the level that was asked for."""
    choice = answer["choices"][0]
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    prompt_tokens, completion_tokens = (
        _count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")
    )
    if asked is Level.TEXT:
        return Evidence(asked, (), None, None, None, prompt_tokens, completion_tokens)
    counts = (prompt_tokens, completion_tokens)
    logprobs, flaws = _logprobs(choice.get("logprobs"))
    if not flaws and completion_tokens is not None and len(logprobs) != completion_tokens:
        flaws.append(f"{len(logprobs)} log-probabilities, usage counts {completion_tokens} tokens")
    if flaws:
        return Evidence(Level.TEXT, tuple(flaws), None, None, None, *counts)
    if asked is Level.LOGPROBS:
        return Evidence(asked, (), None, None, logprobs, *counts)
    places = [one["prompt_token_ids"] for one in (answer, choice) if "prompt_token_ids" in one]
    prompt, completion = next(iter(places), None), choice.get("token_ids")
    if len(places) > 1:
        flaws.append("prompt_token_ids stand beside the choice and in it")
    flaws += [
        *_ids("prompt_token_ids", prompt, prompt_tokens),
        *_ids("token_ids", completion, completion_tokens),
    ]
    # Ids and log-probabilities are equally many now: as many of each as the engine counted.
    if flaws:
        return Evidence(Level.LOGPROBS, tuple(flaws), None, None, logprobs, *counts)
    return Evidence(asked, (), prompt, completion, logprobs, *counts)


def _ids(name: str, ids: Any, counted: int | None) -> list[str]:
    if not isinstance(ids, list):
        return [f"the engine gave no {name}"]
    if not ids:
        return [f"{name} is empty"]
    # By type, since a bool is an int to isinstance, and 1.0 equals 1.
    wrong = [one for one in ids if type(one) is not int or not 0 <= one < 1 << 32]
    if wrong:
        return [f"{name} holds {wrong[0]!r:.40}, which is no token id"]
    if counted is None:
        return [f"usage does not count the tokens of {name}"]
    if counted != len(ids):
        return [f"{len(ids)} {name}, usage counts {counted}"]
    return []


def _logprobs(value: Any) -> tuple[list[float], list[str]]:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        return [], ["the engine gave no log-probabilities"]
    found: list[float] = []
    for one in content:
        number: Any = one.get("logprob") if isinstance(one, dict) else None
        # By type, since a bool is an int to isinstance; an int that no float can hold is none.
        if type(number) is not float and not (type(number) is int and abs(number) < 1 << 53):
            return [], [f"{number!r:.40} is no log-probability"]
        if not math.isfinite(number) or number > 0:
            return [], [f"log-probability {number} is not finite and at most 0"]
        found.append(float(number))
    return found, []


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
