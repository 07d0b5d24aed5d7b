"""How a sequence's answer is made of its hidden vectors, instead of by sampling.

The step that computes a token also computes its hidden vector, which is not kept. So what a step contributes is kept on
the host (`Sequence.pooled`), and the answer is the sum of the contributions.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Rows = Literal["first", "last", "mean"]
Readout = Literal["hidden", "classes"] | tuple[int, ...]


class PoolingPlan(Struct, frozen=True, gc=False):
    """Which hidden vectors are pooled, and the result computed from them.

    Attributes:
        rows: Those of the first, of the last, or of all tokens; of all, their sum, or their mean where a head reads it.
        is_whole: All tokens have to be computed in one step, because each attends to all others.
        readout: The vector itself, the model's scores of it for its classes, or for these tokens.
    """

    rows: Rows
    readout: Readout = "hidden"
    is_whole: bool = False

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether the hidden vectors of a known prefix count too, so that it has to be computed again."""
        return self.rows != "last" or self.is_whole
