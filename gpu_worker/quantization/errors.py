"""The error of a quantization that cannot be read."""

from __future__ import annotations

from shared.errors import HeadraceError


class QuantizationError(HeadraceError):
    """A field of a `quantization_config` is missing, malformed or not supported."""

    def __init__(self, field: str, problem: str) -> None:
        """Say which field, below `quantization_config`, what is wrong with it, and what is supported."""
        super().__init__(f"{field!r} {problem}")
        self.field = field
        self.problem = problem
