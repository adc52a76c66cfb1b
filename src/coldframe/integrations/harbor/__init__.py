"""Coldframe as an environment of Harbor's; docs/harbor.md."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("harbor") is None:
    raise ImportError(
        "coldframe.integrations.harbor needs Harbor: pip install harbor, with Python 3.12 or later"
    )

from coldframe.integrations.harbor.environment import ColdframeEnvironment

__all__ = ["ColdframeEnvironment"]
