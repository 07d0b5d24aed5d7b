"""What the blocks of a rank are made with, in place of what those of a whole model are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.ranks.rank import Ranks
from kernels.layer_cache import LayerCache
from kernels.paged_attention import AttentionOptions, Partial, merge_partials, paged_attention


@dataclass(frozen=True, slots=True)
class ReceivedStream:
    """The residual stream from the stage before, in the place of the embeddings."""

    ranks: Ranks
    hidden_size: int
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        return self.ranks.receive(token_ids.new_empty(len(token_ids), self.hidden_size, dtype=self.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class SpreadNorm:
    """RMS normalisation of vectors of which each rank has as many features."""

    ranks: Ranks

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the features that are here, `[num_tokens, size]`; `weight` is theirs."""
        wide = x.float()
        squares = self.ranks.sum(wide.square().mean(dim=1, keepdim=True)) / self.ranks.size
        return (wide * torch.rsqrt(squares + eps) * weight.float()).to(x.dtype)


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


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Attention from a rank's heads to all tokens, of which its cache has some: each rank has some of each sequence.

    Each attends to its own for the heads of all of them. What they come to is exchanged with the logs of the sums of
    exponentials, and each rank merges its own heads.
    Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
    """

    ranks: Ranks

    def __call__(self, query: torch.Tensor, cache: LayerCache, *step: Any, options: AttentionOptions) -> torch.Tensor:
        """Do what `paged_attention` promises; the KV heads are those of all ranks that share the tokens."""
        tokens, (num_tokens, num_heads, _) = self.ranks.tokens, query.shape
        heads = self.ranks.swap(query.expand(tokens.step, *query.shape)).transpose(0, 1).flatten(1, 2)
        lse = torch.empty(heads.shape[:2], dtype=torch.float32, device=query.device)
        attend: Callable[..., torch.Tensor] = paged_attention
        values = attend(heads, cache, *step, options=options, partial=Partial(tokens, lse))
        attended = torch.cat((values, lse[..., None]), 2).view(num_tokens, tokens.step, num_heads, -1)
        parts = self.ranks.swap(attended.transpose(0, 1))
        return merge_partials(parts[..., :-1], parts[..., -1], options.sinks).to(query.dtype)
