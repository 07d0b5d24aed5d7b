"""The ranks that a model is divided among: processes that compute the same steps, each with a part of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.collectives import Exchange
from kernels.layer_cache import EVERY_TOKEN, CachedTokens
from kernels.low_rank import AdapterRows
from kernels.moe import Experts
from kernels.rms_norm import rms_norm


class Ranks(Protocol):
    """One of several ranks, and what it does with the others. All ranks do the same, in the same order."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def has_whole_experts(self) -> bool:
        """Whether each has some experts as a whole; else it has some features of each."""

    @property
    def num_redundant_experts(self) -> int | None:
        """Places for experts, over all ranks, beyond one for each; None where no expert moves to another place."""

    @property
    def exchange(self) -> Exchange | None:
        """By what the kernels of a CPU sum within a step; None where they cannot."""

    @property
    def tokens(self) -> CachedTokens:
        """Which tokens of each sequence it keeps: `step` ranks in a row, from a multiple of that on, keep all."""

    @property
    def divides_sequences(self) -> bool:
        """Whether each has all attention weights, and attends for the sequences alone whose tokens it keeps."""

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        """Give each of the ranks that together keep all tokens its part, `x[i]` to the `i`th, and return theirs."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, the same bits on each; `x` may be overwritten."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, size * num_columns]`, the columns of all ranks in their order, on each."""

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` by what it is on rank 0 of the group, and return it; only those of the last stage call it."""

    @property
    def stage(self) -> int:
        """Which layers it has: stages follow one another, and each has as many ranks."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""

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

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Refuse: there is no stage before."""
        raise AssertionError("there is one stage")

    def send(self, x: torch.Tensor) -> None:
        """Refuse: there is no stage behind."""
        raise AssertionError("there is one stage")

    tell_last = send


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


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage: about as many each, the later ones fewer, since the head comes behind the last."""
    ends = [-(-num_layers * number // num_stages) for number in range(num_stages + 1)]
    return range(ends[stage], ends[stage + 1])


class ReceivedStream:
    """The residual stream from the stage before, in the place of the embeddings."""

    def __init__(self, ranks: Ranks, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._ranks = ranks
        self._like = torch.empty(0, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        return self._ranks.receive(self._like.new_empty(len(token_ids), self._like.shape[1]))


@dataclass(frozen=True, slots=True, eq=False)
class VectorNorm:
    """RMS normalisation of vectors of which each rank has as many features."""

    ranks: Ranks

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the features that are here, `[num_tokens, size]`; `weight` is theirs."""
        if self.ranks.size == 1:
            return rms_norm(x, weight, eps)
        wide = x.float()
        squares = self.ranks.sum(wide.square().mean(dim=1, keepdim=True)) / self.ranks.size
        return (wide * torch.rsqrt(squares + eps) * weight.float()).to(x.dtype)


class SummedExperts:
    """Experts of which each rank has some, or some features of each: their results are summed."""

    def __init__(self, experts: Experts, ranks: Ranks, num_experts: int) -> None:
        self._experts = experts
        self._ranks = ranks
        own = experts.tokens_per_expert
        # Who has some experts counts the tokens of those alone.
        self._counted = own.new_zeros(num_experts) if ranks.has_whole_experts else None
        self.tokens_per_expert = own if self._counted is None else self._counted

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapters: AdapterRows | None = None
    ) -> torch.Tensor:
        """Do what `Experts` promises."""
        if self._counted is not None:
            chosen = ids.flatten().long()
            self._counted.index_add_(0, chosen.clamp(min=0), (chosen >= 0).to(self._counted.dtype))
        return self._ranks.sum(self._experts(x, self._placed(ids), weights, adapters))

    def _placed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of experts, among those of all ranks, that compute each token."""
        return ids
