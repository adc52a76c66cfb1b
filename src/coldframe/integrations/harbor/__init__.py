"""Coldframe as an environment of Harbor's: docs/harbor.md.

harbor run -e coldframe.integrations.harbor:ColdframeEnvironment -p TASKS -a AGENT
"""

from __future__ import annotations

try:
    import harbor as _harbor
except ImportError as error:
    raise ImportError(
        "coldframe.integrations.harbor needs Harbor: pip install harbor, with Python 3.12 or later"
    ) from error

from coldframe.integrations.harbor.environment import ColdframeEnvironment

__all__ = ["ColdframeEnvironment"]
