"""The ranks that a model is divided among: processes that compute the same steps, each with a part of the weights."""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch

from kernels.collectives import Exchange
from kernels.layer_cache import EVERY_TOKEN, CachedTokens


class Ranks(Protocol):
    """One of several ranks, and what it does with the others. All ranks do the same, in the same order.

    Attributes:
        rank: Its number among those of its stage, from 0.
        size: How many there are.
        stage: Which layers it has: stages follow one another, and each has as many ranks.
        num_stages: How many stages there are.
        has_whole_experts: Whether each has some experts as a whole; else it has some features of each.
        num_redundant_experts: Places for experts, over all ranks, beyond one for each; None where no expert moves to
            another place.
        tokens: Which tokens of each sequence it keeps: `step` ranks in a row, from a multiple of that on, keep all.
        divides_sequences: Whether each has all attention weights, and attends for the sequences alone whose tokens it
            keeps.
    """

    rank: int
    size: int
    stage: int
    num_stages: int
    has_whole_experts: bool
    num_redundant_experts: int | None
    tokens: CachedTokens
    divides_sequences: bool

    @property
    def exchange(self) -> Exchange | None:
        """By what the kernels of a CPU sum within a step; None where they cannot."""

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        """Give each of the ranks that together keep all tokens its part, `x[i]` to the `i`th, and return theirs."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, the same bits on each; `x` may be overwritten."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, size * num_columns]`, the columns of all ranks in their order, on each."""

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` by what it is on rank 0 of the group, and return it; only those of the last stage call it."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` by what this rank of the stage before has sent, and return it."""

    def send(self, x: torch.Tensor) -> None:
        """Send this rank of the next stage what it receives; `x` is not changed any more."""

    def tell_last(self, x: torch.Tensor) -> None:
        """Let those of the last stage share `x`, which may be overwritten then; rank 0 of the first stage calls it."""

    def least(self, number: int) -> int:
        """Return the least of the numbers of all ranks of all stages."""


class OneStage:
    """Ranks that have all layers."""

    stage, num_stages = 0, 1
    num_redundant_experts: int | None = None

    def receive(self, x: torch.Tensor) -> NoReturn:
        """Refuse: there is one stage."""
        raise AssertionError("there is one stage")

    send = tell_last = receive


class Alone(OneStage):
    """A process with the whole model."""

    rank, size, has_whole_experts, divides_sequences, exchange, tokens = 0, 1, False, False, None, EVERY_TOKEN

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return x

    gather = share = swap = sum

    def least(self, number: int) -> int:
        """Return it as it is."""
        return number


ALONE: Ranks = Alone()


def is_last(ranks: Ranks) -> bool:
    """Whether a rank has the last layers, and the head: those draw tokens."""
    return ranks.stage == ranks.num_stages - 1


def sum_in_kernels(ranks: Ranks) -> bool:
    """Whether a CPU computes all layers in one call: there is nothing to sum, or the kernels do, feature by feature."""
    is_divided_otherwise = ranks.has_whole_experts or ranks.divides_sequences or ranks.tokens != EVERY_TOKEN
    return ranks.num_stages == 1 and (ranks.size == 1 or (ranks.exchange is not None and not is_divided_otherwise))


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage: about as many each, the later ones fewer, since the head comes behind the last."""
    ends = [-(-num_layers * number // num_stages) for number in range(num_stages + 1)]
    return range(ends[stage], ends[stage + 1])
