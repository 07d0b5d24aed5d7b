"""The error of a quantization that cannot be read."""

from __future__ import annotations

from shared.errors import HeadraceError

OTHER_FORMS = "take the same model in 16 bits, which `headrace quantize` makes smaller, or in FP8, GPTQ, AWQ or GGUF"
"""What helps where no part of a form is served."""


class QuantizationError(HeadraceError):
    """A field of a `quantization_config`, whose whole path is `field`, is missing, malformed or not supported."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = f"quantization_config.{field}".removesuffix(".")
        super().__init__(f"{self.field!r} {problem}")
        self.problem = problem
