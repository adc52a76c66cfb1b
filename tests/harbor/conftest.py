"""Collected only where Harbor is installed, which needs Python 3.12 and a lane of its own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("harbor") else ["test_*.py"]
