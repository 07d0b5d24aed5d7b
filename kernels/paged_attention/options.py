"""How a layer attends, and of which tokens: what every implementation of paged attention takes beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layer_cache import CachedTokens


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """How a layer attends, the same in every step.

    Attributes:
        scale: Multiplies the scores.
        sliding_window: A query sees this many tokens at most, itself included; None is unlimited.
        soft_cap: Scores `s` become `soft_cap * tanh(s / soft_cap)`; None leaves them.
        sinks: `[num_heads]` float32, for each head a logit without a value that joins the softmax, not scaled and not
            capped; None is none. Source: Xiao et al., arXiv 2309.17453, section 3.3, as gpt-oss has it.
        chunk_size: A query sees only the tokens of its own chunk, where chunks of this many tokens follow one another
            from the sequence's start; None is unlimited.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        assert self.sinks is None or self.sinks.dtype is torch.float32


@dataclass(frozen=True, slots=True)
class Partial:
    """A cache that holds only some of the tokens that a query attends to.

    Attributes:
        tokens: Those that the cache has, one after another in its blocks.
        lse: `[num_tokens, num_heads]` float32, overwritten by the log of each row's sum of exponentials: -inf for a row
            that sees none of these tokens.
    """

    tokens: CachedTokens
    lse: torch.Tensor
