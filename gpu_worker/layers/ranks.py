"""The ranks that a model is divided among: processes that compute the same steps, each with a part of the weights."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.moe import Experts


class Ranks(Protocol):
    """One of several ranks, and what it does with the others. All ranks do the same, in the same order."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, the same bits on each; `x` may be overwritten."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, size * num_columns]`, the columns of all ranks in their order, on each."""
        ...

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """Do the same on rank 0 alone; the others get nothing."""
        ...

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` by what it is on rank 0, and return it."""
        ...


class Alone:
    """A process with the whole model."""

    rank, size = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return x

    gather = share = sum

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return it as it is."""
        return x


ALONE: Ranks = Alone()


class SummedExperts:
    """Experts of which each rank has some features: their results are summed."""

    __slots__ = ("_experts", "_ranks")

    def __init__(self, experts: Experts, ranks: Ranks) -> None:
        """Hold this rank's."""
        self._experts = experts
        self._ranks = ranks

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """Do what `Experts` promises."""
        return self._experts.tokens_per_expert

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Do what `Experts` promises."""
        return self._ranks.sum(self._experts(x, ids, weights))
