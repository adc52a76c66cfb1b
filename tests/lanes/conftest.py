"""Collected only by `tools/mini-swe-agent-lane`, which installs it and names its Python."""

from __future__ import annotations

import os

from tests.integration.inference.conftest import make_bench

__all__ = ["make_bench"]

LANE_PYTHON = "COLDFRAME_LANE_PYTHON"
collect_ignore_glob = [] if os.environ.get(LANE_PYTHON) else ["test_*.py"]
