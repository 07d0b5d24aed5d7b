"""What a layer that predicts hidden vectors is made of, and what its two forms, layered and fused, promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import LMHead
from gpu_worker.models.config import ModelConfig
from kernels.linear import Linear

Candidates = tuple[list[int], list[float]]
"""Tokens that may come next, likely ones first, and their log probabilities given the chain before."""


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


class LayerForm(Protocol):
    """The layer in the form that is fastest on the device. One thread calls it."""

    def __call__(self, step: EntryStep) -> torch.Tensor:
        """Write the entries into the cache; return what they yield, `[num_tokens, hidden_size]`."""
        ...

    def draft(
        self, step: EntryStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Candidates]]:
        """Do the same, and draft behind the first sequences; return the candidates of each depth by sequence.

        Args:
            step: The entries of the first sequences, and of any others.
            limits: The step's `limits`, on the host.
            num_candidates: Of a depth, at most; all stand behind the likeliest of the depth before.
            least_score: The log probability that the chain of the likeliest must have to go on.
        """
        ...


class DraftLayer:
    """A layer that was trained for one model, and predicts its next hidden vector. Holds weights only.

    `relative_cost` is what a pass with scores takes, as a share of a step of the model, by their weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        form: LayerForm,
        dtype: torch.dtype,
        device: torch.device,
        relative_cost: float,
        reduce: Linear | None = None,
    ) -> None:
        """Hold the layer's form; `reduce` makes one vector of the tapped layers, None reads the head's input."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.relative_cost = relative_cost
        self._reduce = reduce
        self._form = form

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Write entries into the cache, and return what they yield; `hidden` is as the model's `forward()` returned."""
        return self._form(EntryStep(token_ids, self._read(hidden), positions, context))

    def draft(
        self, step: EntryStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Candidates]]:
        """Do what `LayerForm` promises, with hidden vectors that the model's `forward()` returned."""
        read = dataclasses.replace(step, hidden=self._read(step.hidden))
        return self._form.draft(read, limits, num_candidates, least_score)

    def _read(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._reduce is None:
            return hidden
        return self._reduce(hidden[:, self.config.hidden_size :].to(self.dtype))
