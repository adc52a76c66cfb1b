"""Rewards computed again by another schema or verifier: new records beside the old, never edits."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from coldframe.learning.contracts.errors import ContractError
from coldframe.learning.contracts.values import is_number
from coldframe.learning.files import canonical
from coldframe.learning.schemas.scalar import scalarise
from coldframe.learning.schemas.schema import RewardSchema
from coldframe.protocol import strict_json
from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.lines import append, cut_torn_line


class DerivedReward(BaseModel):
    """What one trial is worth by one schema and one verifier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trial: str
    task: str
    schema_label: str
    schema_digest: str
    rule: str
    verifier_digest: str
    parts: dict[str, float] | None
    value: float | None
    decided_by: str | None
    left_out: tuple[str, ...] = ()
    refused: str | None = None
    """Why there is no value."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What it is the one record of."""
        return self.trial, self.schema_label, self.verifier_digest


def derive(
    schema: RewardSchema,
    *,
    trial: str,
    task: str,
    parts: Mapping[str, float] | None,
    verifier_digest: str,
) -> DerivedReward:
    """Return what a verdict is worth by a schema; a refusal by the schema is a record too.

    Raises:
        ContractError: a part is no finite number, so this is no verdict.
    """
    for key, value in (parts or {}).items():
        if not is_number(value):
            raise ContractError(trial, f"rewards[{key!r}]", value, "is no finite number")
    facts: dict[str, Any] = {
        "trial": trial,
        "task": task,
        "schema_label": schema.label,
        "schema_digest": schema.digest,
        "rule": schema.scalarise,
        "verifier_digest": verifier_digest,
        "parts": None if parts is None else dict(parts),
    }
    try:
        made = scalarise(schema, parts, trial)
    except ContractError as error:
        return DerivedReward(**facts, value=None, decided_by=None, refused=str(error))
    return DerivedReward(
        **facts, value=made.value, decided_by=made.decided_by, left_out=made.left_out
    )


class Drift(BaseModel):
    """A trial that is worth something else than it was."""

    model_config = ConfigDict(frozen=True)

    before: DerivedReward
    after: DerivedReward

    @property
    def changed(self) -> tuple[str, ...]:
        """What is not the same: `schema`, `verifier`, or both."""
        pairs = {
            "schema": (self.before.schema_label, self.after.schema_label),
            "verifier": (self.before.verifier_digest, self.after.verifier_digest),
        }
        return tuple(name for name, (old, new) in pairs.items() if old != new)


def drift(records: Iterable[DerivedReward]) -> tuple[Drift, ...]:
    """Return each step from a trial's record to its next by which its worth changed, in order."""
    trials: dict[str, list[DerivedReward]] = {}
    for one in records:
        trials.setdefault(one.trial, []).append(one)
    return tuple(
        Drift(before=before, after=after)
        for ordered in trials.values()
        for before, after in pairwise(ordered)
        if before.value != after.value
    )


class DerivedStore:
    """Derived records in a file, one JSON object per line, to which lines are only ever added."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[DerivedReward, ...]:
        """Return all records, oldest first.

        Raises:
            InvalidRequestError: a line is no record.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]  # what has no end, a killed one left
        except FileNotFoundError:
            return ()
        records = []
        for number, line in enumerate(lines, 1):
            try:
                strict_json.parse(line)
                records.append(DerivedReward.model_validate_json(line))
            except strict_json.NotStrictError as error:
                raise InvalidRequestError(f"{self.path}:{number}: no record: {error}") from error
            except ValidationError as error:
                first = error.errors()[0]["msg"]
                raise InvalidRequestError(f"{self.path}:{number}: no record: {first}") from error
        return tuple(records)

    def add(self, records: Iterable[DerivedReward]) -> int:
        """Add those that are not there yet; return how many were. All or none.

        Raises:
            InvalidRequestError: a record of the same trial, schema and verifier says otherwise, or
                a schema has other rules than under the same version before.
        """
        with self.path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            whole = cut_torn_line(self.path)
            old = self.read()
            known = {one.identity: one for one in old}
            schemas = {one.schema_label: one.schema_digest for one in old}
            new: list[DerivedReward] = []
            for one in records:
                if schemas.setdefault(one.schema_label, one.schema_digest) != one.schema_digest:
                    raise InvalidRequestError(
                        f"{self.path}: {one.schema_label} was changed; raise its version"
                    )
                if one.identity not in known:
                    known[one.identity] = one
                    new.append(one)
                elif known[one.identity] != one:
                    raise InvalidRequestError(
                        f"{self.path}: {one.trial} has another record by {one.schema_label} and "
                        f"verifier {one.verifier_digest[:12]}; records are never edited"
                    )
            lines = b"".join(canonical(json.loads(one.model_dump_json())) + b"\n" for one in new)
            append(file.fileno(), lines, whole)
            os.fsync(file.fileno())
        return len(new)
