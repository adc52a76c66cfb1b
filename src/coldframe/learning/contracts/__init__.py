"""The rejecting contract: what a trial must prove before a trainer may learn from it.

Evidence goes in as it was found (`Trial`), and a `PolicyRollout` comes out or a `ContractError`
that names trial, field and value. Nothing is guessed, converted, filled up, clipped or left out.
Knows neither Harbor nor torch. See docs/contracts.md
"""

from coldframe.learning.contracts.batch import Batch, BatchManifest
from coldframe.learning.contracts.errors import ContractError
from coldframe.learning.contracts.evidence import (
    Call,
    Parameters,
    PolicyIdentity,
    Provenance,
    Segment,
    Totals,
    Trial,
    TrialStep,
)
from coldframe.learning.contracts.masks import MASKS, LossMask
from coldframe.learning.contracts.rollouts import PolicyRollout, TokenRollout
from coldframe.learning.contracts.sequences import (
    Gated,
    LengthGate,
    TrainingSequence,
    training_sequences,
)
from coldframe.learning.contracts.topologies import (
    LINEAR,
    MULTI_STEP_FINAL,
    MULTI_STEP_MEAN,
    SEGMENTS,
    TOPOLOGIES,
    Span,
    Topology,
)

__all__ = [
    "LINEAR",
    "MASKS",
    "MULTI_STEP_FINAL",
    "MULTI_STEP_MEAN",
    "SEGMENTS",
    "TOPOLOGIES",
    "Batch",
    "BatchManifest",
    "Call",
    "ContractError",
    "Gated",
    "LengthGate",
    "LossMask",
    "Parameters",
    "PolicyIdentity",
    "PolicyRollout",
    "Provenance",
    "Segment",
    "Span",
    "TokenRollout",
    "Topology",
    "Totals",
    "TrainingSequence",
    "Trial",
    "TrialStep",
    "training_sequences",
]
