"""What a layer that predicts hidden vectors is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import Embedding, LMHead


@dataclass(frozen=True, slots=True)
class PairNorms:
    """The input of EAGLE-3: attention reads the embedding and the hidden vector side by side, each normalised."""

    embedding: torch.Tensor
    hidden: torch.Tensor
    is_stream_normed: bool = False


@dataclass(frozen=True, slots=True)
class NormedJoin:
    """The input of MTP heads: a projection of both vectors, each normalised, is the residual stream."""

    projection: Projection
    embedding: NormWeights
    hidden: NormWeights


@dataclass(frozen=True, slots=True)
class LayerHead:
    """From hidden vectors to tokens.

    Attributes:
        matrix: `[num_features, hidden_size]`, or the model's own head.
        norm: `[hidden_size]`, applied before it; None is nothing.
        token_ids: `[num_features]` int32, the token of each feature; None where features are numbered as tokens.
        hands_on_normed: At the next depth the layer reads its own result behind `norm`.
    """

    matrix: Projection | LMHead
    norm: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    hands_on_normed: bool = False


@dataclass(frozen=True, slots=True)
class DraftLayerWeights:
    """A layer's weights, in the type that it computes in; EAGLE's plain `inputs` project both vectors side by side."""

    embedding: Embedding
    inputs: Projection | PairNorms | NormedJoin
    layer: LayerWeights
    head: LayerHead
    eps: float
    rotations: Rotations


@dataclass(frozen=True, slots=True)
class EntryStep:
    """The entries to compute at once, of all sequences end to end (`proposer` says what an entry is).

    Attributes:
        token_ids, positions: `[num_tokens]` int64, the token behind each hidden vector, and the vector's position.
        hidden: `[num_tokens, hidden_size]`, what the layer reads of the model, or what it yielded itself.
        context: The batch as attention sees it, over the layer's cache.
        limits: `[num_drafting]` int64, most draft tokens, at least 1, of each of the first sequences; None drafts none.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    context: AttentionContext
    limits: torch.Tensor | None = None
