"""The phases of an attempt, what each asked of the network, and what was tampered with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coldframe.protocol.models import ProcessInfo
from coldframe.protocol.network import EgressDecision, EgressKind
from coldframe.trajectories.base import Model
from coldframe.trajectories.files import ChangedFiles


class EgressDecided(Model):
    """One decision on the network; names are the sandbox's words, secrets redacted."""

    at: float
    step: int | None = None
    """Index of the step during which it fell; None: beside all steps."""
    kind: EgressKind
    decision: EgressDecision
    connection: int | None = None
    name: str | None = None
    address: str | None = None
    port: int | None = None
    rule: str | None = None
    reason: str = ""
    bytes_out: int = 0
    bytes_in: int = 0


class Egress(Model):
    """What one phase asked of the network: every decision counted, the first ones kept."""

    counts: dict[str, int] = Field(default_factory=dict)
    """`KIND.DECISION` → how many, those that are not kept included."""
    bytes_out: int = 0
    bytes_in: int = 0
    events: tuple[EgressDecided, ...] = ()
    left_out: int = Field(default=0, ge=0)
    """Counted and not kept."""
    lost: int = Field(default=0, ge=0)
    """Dropped by the node before they could be read, so not counted either."""

    @property
    def asked(self) -> dict[str, int]:
        """`counts` of what was asked of the network: without those of the policy being set."""
        own = f"{EgressKind.POLICY}."
        return {what: count for what, count in self.counts.items() if not what.startswith(own)}


class PhaseRecord(Model):
    """A stretch of an attempt with one user, one network policy and one set of visible files."""

    name: Literal["build", "start", "agent", "verify"]
    step: str | None = None
    """Of a task of several steps: which."""
    sandbox_id: str | None = None
    user: str | None = None
    """None: the image's own."""
    network: tuple[str, ...] = ()
    """The policy in force, in text form; empty: nothing but itself."""
    visible: tuple[str, ...] = ()
    """What this phase alone has: paths that are brought for it, or emptied after it."""
    started_at: float
    ended_at: float
    killed: tuple[ProcessInfo, ...] = ()
    """What was killed at its end, because it must not live on."""
    survivors: tuple[ProcessInfo, ...] = ()
    """What lived on into the next phase."""
    egress: Egress = Egress()
    files: ChangedFiles | None = None
    """Of the agent's: what became of the files after the last look at them, until all that must
    not live on was dead. A command that was interrupted shows here."""


class TamperEvent(Model):
    """Something that the verdict rests on is not what it was."""

    at: float
    step: str | None = None
    what: str
    """A stable word: `tests_changed`, `key_input_changed`, `program_changed`, `reward_late`..."""
    path: str
    before: str
    after: str
    voided: bool
    """Whether the verdict was voided; else it stands, and this says with what reservation."""
