"""What of a prompt its token ids do not tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from coldframe.inference.evidence import Evidence
from coldframe.trajectories.calls import Level

_TEXTS = ("text", "input_text", "output_text", "refusal", "thinking")


def held_to_prompt(evidence: Evidence, messages: Iterable[Any]) -> Evidence:
    """Return evidence without ids if the messages hold an image or the like.

    Every image of a size has the same ids: whoever trained on them would train on another prompt.
    """
    if evidence.level is not Level.TOKENS or (kind := _beyond_text(messages)) is None:
        return evidence
    flaw = f"the prompt holds a part of type {kind!r:.40}, of which ids tell nothing"
    flaws = (*evidence.flaws, flaw)
    return replace(evidence, level=Level.LOGPROBS, flaws=flaws, prompt=None, completion=None)


def _beyond_text(messages: Iterable[Any]) -> object:
    """Return the type of the first part of a message that is no text."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "unknown") if isinstance(part, dict) else "text"
            if kind not in _TEXTS:
                return kind
    return None
