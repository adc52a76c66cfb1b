"""Reward schemas: what the numbers of a verdict mean, and how they become one. See
docs/contracts.md"""

from coldframe.learning.schemas.derived import DerivedReward, DerivedStore, Drift, derive, drift
from coldframe.learning.schemas.fixtures import CASES, run_fixtures
from coldframe.learning.schemas.scalar import Scalar, scalarise
from coldframe.learning.schemas.schema import (
    SCHEMA_FILE,
    Fixture,
    FixtureCase,
    Gate,
    Part,
    RewardSchema,
    RewardSchemaError,
    Veto,
    load_schema,
)

__all__ = [
    "CASES",
    "SCHEMA_FILE",
    "DerivedReward",
    "DerivedStore",
    "Drift",
    "Fixture",
    "FixtureCase",
    "Gate",
    "Part",
    "RewardSchema",
    "RewardSchemaError",
    "Scalar",
    "Veto",
    "derive",
    "drift",
    "load_schema",
    "run_fixtures",
    "scalarise",
]
