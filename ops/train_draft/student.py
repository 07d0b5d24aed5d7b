"""What is trained: a module that predicts what follows each token of a row, and the files that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ops.train_draft.rows import Batch


class Student(Protocol):
    """One kind of draft, under training."""

    @property
    def module(self) -> torch.nn.Module:
        """Everything that is trained."""
        ...

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss that training makes small."""
        ...

    def draft_tokens(self, batch: Batch, count: int) -> torch.Tensor:
        """Return the likeliest tokens behind each place, as a chain whose earlier tokens were all accepted.

        What stands behind the place in the row is what the target said, so it stands for those earlier tokens.

        Shapes:
            result: `[num_rows, length, at most count]` int64; token `g` of place `p` is for place `p + 1 + g` of the
                row, or `p + 2 + g` where the draft only begins behind a token that the target sampled itself
        """
        ...

    @property
    def first_distance(self) -> int:
        """How many places behind that of its hidden vector the first draft token is: 1 or 2."""
        ...

    def config(self) -> dict[str, Any]:
        """Return what `config.json` says."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by their names in the file."""
        ...
