"""Read an agent's conversation in ATIF (1.0 to 1.8), its continuations and its sub-agents.

The models have ATIF's own fields; what they mean is said there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coldframe.integrations.harbor_trials.reading import (
    Folder,
    ImportRefusedError,
    parse,
    validated,
)
from coldframe.protocol.text import excerpt

MAX_DOCUMENTS = 256
Json = dict[str, Any]
Count = Annotated[int, Field(strict=True, ge=0)]


class _Model(BaseModel):
    """A field that is not ATIF's is refused, as Harbor refuses it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Model):
    media_type: str
    path: str
    duration_sec: float | None = None


class Part(_Model):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: Source | None = None

    @model_validator(mode="after")
    def _whole(self) -> Part:
        if (self.text is None) == (self.type == "text") or (self.source is None) == (
            self.type != "text"
        ):
            raise ValueError("a part is a text, or has a source")
        return self


Content = str | list[Part]


class Metrics(_Model):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Json | None = None


class Reference(_Model):
    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Json | None = None


class Result(_Model):
    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[Reference] | None = None
    extra: Json | None = None


class Observation(_Model):
    results: list[Result]


class ToolCall(_Model):
    tool_call_id: str
    function_name: str
    arguments: Json
    extra: Json | None = None


class AtifStep(_Model):
    step_id: Count
    timestamp: datetime | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: Count | None = None
    extra: Json | None = None


class Agent(_Model):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: Json | None = None


class Document(_Model):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.[0-8]$")]
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: list[AtifStep] = Field(min_length=1)
    notes: str | None = None
    final_metrics: Json | None = None
    continued_trajectory_ref: str | None = None
    extra: Json | None = None
    subagent_trajectories: list[Json] | None = None


@dataclass(frozen=True)
class Found:
    """A document, where it was found, and what it is to the others."""

    path: str
    value: dict[str, Any]
    document: Document
    kind: Literal["main", "continuation", "sub_agent"]
    owner: str | None


@dataclass
class Conversation:
    """The documents of one agent run, the main one first, each after its owner."""

    documents: list[Found] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """References to what is not there, in words."""

    def steps(self) -> list[tuple[dict[str, Any], AtifStep]]:
        """Return the main conversation's steps, raw and read; copied ones stand there once."""
        return [
            (raw, step)
            for found in self.documents
            if found.kind != "sub_agent"
            for raw, step in zip(found.value["steps"], found.document.steps, strict=True)
            if not step.is_copied_context
        ]


def read_conversation(trial: Folder, directory: tuple[str, ...]) -> Conversation | None:
    """Return the conversation that lies in a trial's directory of an agent; None without one.

    Raises:
        ImportRefusedError: it is no ATIF, or leads out of its directory.
    """
    return _Reader(trial, directory).read()


class _Reader:
    def __init__(self, trial: Folder, directory: tuple[str, ...]) -> None:
        self._trial, self._directory = trial, directory
        self._made = Conversation()
        self._paths: set[str] = set()

    def read(self) -> Conversation | None:
        if not self._file("trajectory.json", "main", None):
            return None
        return self._made

    def _file(self, name: str, kind: Any, owner: str | None) -> bool:
        """Read a document of the agent's directory; False if it is not there."""
        parts = PurePosixPath(name).parts
        path = "/".join((*self._directory, *parts))
        if path in self._paths:
            raise ImportRefusedError(path, "", "is referred to twice")
        content = self._trial.read(*self._directory, *parts)
        if content is None:
            return False
        self._paths.add(path)
        value = parse(content, path)
        self._add(Found(path, value, validated(Document, value, path), kind, owner))
        return True

    def _add(self, found: Found) -> None:
        """Keep a document and read those that it refers to."""
        documents = self._made.documents
        documents.append(found)
        if len(documents) > MAX_DOCUMENTS:
            raise ImportRefusedError(found.path, "", f"one of over {MAX_DOCUMENTS} documents")
        embedded = self._embedded(found)
        for place, step in enumerate(found.document.steps):
            for reference in _references(step):
                where = f"steps.{place}.observation"
                if reference.trajectory_id in embedded and not step.is_copied_context:
                    self._add(embedded.pop(reference.trajectory_id))
                elif reference.trajectory_path is not None and not step.is_copied_context:
                    self._follow(reference.trajectory_path, "sub_agent", found, where)
        for left in embedded.values():  # referred to by nobody, and still there
            self._add(left)
        following = found.document.continued_trajectory_ref
        if following is not None:
            self._follow(following, "continuation", found, "continued_trajectory_ref")

    def _embedded(self, found: Found) -> dict[str | None, Found]:
        inner: dict[str | None, Found] = {}
        for value in found.document.subagent_trajectories or ():
            document = validated(Document, value, f"{found.path}#")
            path = f"{found.path}#{document.trajectory_id}"
            if document.trajectory_id is None or document.trajectory_id in inner:
                raise ImportRefusedError(path, "trajectory_id", "is missing, or there twice")
            inner[document.trajectory_id] = Found(path, value, document, "sub_agent", found.path)
        return inner

    def _follow(self, name: str, kind: Any, owner: Found, field: str) -> None:
        if "://" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ImportRefusedError(owner.path, field, f"{excerpt(name)} leads out of the trial")
        if not self._file(name, kind, owner.path):
            self._made.missing.append(f"{owner.path}: {field}: {excerpt(name)} is not there")


def _references(step: AtifStep) -> list[Reference]:
    results = step.observation.results if step.observation else []
    return [one for result in results for one in result.subagent_trajectory_ref or ()]
