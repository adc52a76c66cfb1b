"""Trials of Harbor's as trajectories of ours, and trajectories of ours as ATIF. See docs/atif.md

Needs no Harbor: what its jobs leave on disk is read, by its versions from 0.18 on.
"""

from coldframe.integrations.harbor_trials.atif_export import AtifExportError, to_atif
from coldframe.integrations.harbor_trials.job import ImportReport, import_job
from coldframe.integrations.harbor_trials.reading import ImportRefusedError

__all__ = ["AtifExportError", "ImportRefusedError", "ImportReport", "import_job", "to_atif"]
