"""The error that every defect of a checkpoint raises."""

from __future__ import annotations

from pathlib import Path

from shared.errors import HeadraceError


class CheckpointError(HeadraceError):
    """A model directory cannot be served."""

    def __init__(self, path: Path, problem: str) -> None:
        """Say which file, what is wrong with it, and what is supported."""
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
