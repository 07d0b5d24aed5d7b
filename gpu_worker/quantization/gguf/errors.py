"""The error that every defect of a GGUF file raises."""

from __future__ import annotations

from pathlib import Path

from shared.errors import HeadraceError


class GGUFError(HeadraceError):
    """A GGUF file cannot be read or served: `field` is the metadata key, tensor or part of the header that is wrong."""

    def __init__(self, path: Path, field: str, problem: str) -> None:
        field = field[:120]
        super().__init__(f"{path}: {field} {problem}")
        self.path = path
        self.field = field
        self.problem = problem
