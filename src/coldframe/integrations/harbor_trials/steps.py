"""An agent's conversation as steps of a trajectory; its documents are kept as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coldframe.integrations.harbor_trials.atif import AtifStep, Conversation, Found, Metrics
from coldframe.trajectories.base import BlobRef
from coldframe.trajectories.origin import OriginDocument
from coldframe.trajectories.steps import Shown, ShownMessage, Step, Usage
from coldframe.trajectories.store import BlobStore

TEXT_RULE, PARTS_RULE = "atif@1", "atif_parts@1"


def read_steps(
    conversation: Conversation, blobs: BlobStore, first: int
) -> tuple[tuple[BlobRef, ...], tuple[Step, ...]]:
    """Return what the model was given before its first action, one blob a message, and the steps.

    Args:
        first: index of the first step within the trajectory.
    """
    prompt: list[BlobRef] = []
    steps: list[Step] = []
    for raw, one in conversation.steps():
        if one.source == "agent":
            steps.append(_step(raw, one, first + len(steps), blobs))
            continue
        if not steps:
            message = {"role": one.source, "content": raw["message"]}
            prompt.append(blobs.put(json.dumps(message).encode()))
            continue
        shown = (*steps[-1].shown, _shown(blobs, one.source, one.message), *_results(one, blobs))
        steps[-1] = steps[-1].model_copy(update={"shown": shown})
    return tuple(prompt), tuple(steps)


def _step(raw: dict[str, Any], one: AtifStep, index: int, blobs: BlobStore) -> Step:
    spent = one.metrics or Metrics()
    return Step(
        index=index,
        source="atif",
        action=blobs.put(json.dumps(raw, sort_keys=True).encode()),
        usage=Usage(
            prompt_tokens=spent.prompt_tokens,
            completion_tokens=spent.completion_tokens,
            cached_tokens=spent.cached_tokens,
        ),
        model_attempts=None,
        shown=_results(one, blobs),
        started_at=None,
        ended_at=None,
        model_s=None,
    )


def _results(one: AtifStep, blobs: BlobStore) -> tuple[ShownMessage, ...]:
    results = one.observation.results if one.observation else []
    return tuple(
        _shown(blobs, "tool", result.content, result.source_call_id)
        for result in results
        if result.content is not None
    )


def _shown(blobs: BlobStore, role: str, content: Any, call: str | None = None) -> ShownMessage:
    text, rule = content, TEXT_RULE
    if not isinstance(content, str):
        text, rule = json.dumps(content), PARTS_RULE
    blob = blobs.put(text.encode("utf-8", "surrogatepass"))
    return ShownMessage(role=role, tool_call_id=call, shown=Shown(rule=rule, text=blob))


def kept_documents(documents: Sequence[Found], blobs: BlobStore) -> tuple[OriginDocument, ...]:
    """Store documents as they were read, and return what they are to each other, in order."""
    return tuple(
        OriginDocument(
            path=found.path,
            blob=blobs.put(json.dumps(found.value, sort_keys=True).encode()),
            format=found.document.schema_version,
            kind=found.kind,
            owner=found.owner,
            order=order,
            steps=len(found.document.steps),
            copied_steps=sum(bool(one.is_copied_context) for one in found.document.steps),
        )
        for order, found in enumerate(documents)
    )
