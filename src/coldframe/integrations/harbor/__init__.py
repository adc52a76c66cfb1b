"""Coldframe as an environment of Harbor's: docs/harbor.md.

harbor run -e coldframe.integrations.harbor:ColdframeEnvironment -p TASKS -a AGENT
"""

from __future__ import annotations

from coldframe.integrations.harbor.environment import ColdframeEnvironment

__all__ = ["ColdframeEnvironment"]
