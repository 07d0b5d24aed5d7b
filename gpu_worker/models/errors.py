"""The error that every defect of a checkpoint raises."""

from __future__ import annotations

from pathlib import Path

from shared.errors import HeadraceError


class CheckpointError(HeadraceError):
    """A model directory cannot be served."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
