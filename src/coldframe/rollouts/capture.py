"""The seam to what stands between a harness and its model and keeps the tokens.

A run is given one or none; nothing here knows how it works. Journals are those of
`coldframe.trajectories.calls`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from coldframe.harnesses.base import ModelSettings


class ModelCapture(Protocol):
    """Carries the calls of attempts to the model."""

    @property
    def level(self) -> str:
        """How much is captured; part of what a run is asked to do."""

    def begin(self, attempt_id: str, journal: Path, model: ModelSettings) -> ModelSettings:
        """Begin an attempt, and return what its harness is to use in the place of `model`.

        Raises:
            InvalidRequestError: there is a journal already.
        """

    def begin_step(self, attempt_id: str, name: str) -> None:
        """Tell that what comes is of another step of the task."""

    def end(self, attempt_id: str) -> list[str]:
        """End it: from now on its harness gets no answer.

        Returns:
            What stands against training on it, as warnings.
        """
