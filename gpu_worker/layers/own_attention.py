"""Attention for some sequences of a step, where each rank keeps the keys and values of its own sequences alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class OwnAttention:
    """A mixer with all of its weights, which each rank computes for its own rows; all ranks get the results of all.

    They are summed, since of each row all ranks but one have zeros.
    """

    mixer: Callable[[torch.Tensor, torch.Tensor, AttentionContext], torch.Tensor]
    ranks: Ranks

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what a `MixerBlock` promises."""
        own = context.own
        assert own is not None, "the step does not say which rows are this rank's"
        result = torch.zeros_like(x)
        if own.context is not None:
            mixed = self.mixer(x.index_select(0, own.places), positions.index_select(0, own.places), own.context)
            result.index_copy_(0, own.places, mixed)
        return self.ranks.sum(result)
