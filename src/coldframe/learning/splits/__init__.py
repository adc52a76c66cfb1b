"""Splits that stay apart: made by group, frozen, and compared before anybody trains. See
docs/contracts.md"""

from coldframe.learning.splits.corpus import CorpusTask, read_corpus_task
from coldframe.learning.splits.make import SplitPlan, make_splits
from coldframe.learning.splits.manifest import (
    SplitError,
    SplitManifest,
    SplitTask,
    read_manifest,
    write_manifests,
)
from coldframe.learning.splits.overlaps import Overlap, overlaps

__all__ = [
    "CorpusTask",
    "Overlap",
    "SplitError",
    "SplitManifest",
    "SplitPlan",
    "SplitTask",
    "make_splits",
    "overlaps",
    "read_corpus_task",
    "read_manifest",
    "write_manifests",
]
