"""The agent that does nothing: whatever passes with it grades nothing."""

from __future__ import annotations

from typing import Any

from coldframe.harnesses.base import Episode, Offers, Outcome
from coldframe.trajectories.schema import Termination


class NopHarness:
    """Ends at once."""

    name = "nop"
    version = "1"
    needs_model = False
    needs_solution = False

    def settings(self) -> dict[str, Any]:
        """It has none."""
        return {}

    def refuses(self, offers: Offers) -> str | None:
        """Return nothing: there is nobody to offer anything to."""
        return None

    async def run(self, episode: Episode) -> Outcome:
        """Do nothing."""
        del episode
        return Outcome(Termination.FINISHED)
