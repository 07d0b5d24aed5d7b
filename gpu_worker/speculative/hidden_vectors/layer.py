"""A layer that predicts hidden vectors, and drafts by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec import structs

from gpu_worker.execution.batch.transfers import Downloads
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer import DecoderLayer, LayerWeights
from gpu_worker.layers.linear import LayerParts, Projection
from gpu_worker.layers.norms import Norm, NormWeights, RMSNorm, make_norm
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import Embedding, LMHead
from gpu_worker.models.config import ModelConfig
from kernels.linear import Linear, LinearFactory

# Kernels are compiled anew for a pointer that is aligned otherwise: the numbers of each step begin on a multiple.
_ALIGNED_ITEMS = 16


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


class SingleSteps:
    """Positions and slots of the next tokens of a batch, one token of each sequence a step.

    A sequence takes part in one step for each draft token behind its first. In later steps it is padding.
    """

    def __init__(self, context: AttentionContext, limits: torch.Tensor, num_steps: int) -> None:
        tables, block_size = context.block_tables[: len(limits)], context.caches[0].keys.shape[1]
        steps = torch.arange(num_steps, device=limits.device)[:, None]
        takes_part = steps < limits - 1
        positions = torch.where(takes_part, context.context_lens[: len(limits)] + steps, 0)
        slots = tables.gather(1, (positions // block_size).T).T * block_size + positions % block_size
        self._positions = _aligned(positions)
        self._slots = _aligned(torch.where(takes_part, slots, -1))
        self._context_lens = _aligned(torch.where(takes_part, positions + 1, 0).int())
        self._context = structs.replace(
            context,
            block_tables=tables,
            query_starts=torch.arange(len(limits) + 1, dtype=torch.int32, device=limits.device),
            max_query_len=1,
        )

    def step(self, number: int) -> tuple[torch.Tensor, AttentionContext]:
        """Return the positions and the batch of a step."""
        return self._positions[number], structs.replace(
            self._context,
            slot_mapping=self._slots[number],
            context_lens=self._context_lens[number],
            max_context_len=self._context.max_context_len + number + 1,
        )


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return the same rows, each of which begins on a multiple of `_ALIGNED_ITEMS`."""
    width = rows.shape[1]
    return torch.nn.functional.pad(rows, (0, -width % _ALIGNED_ITEMS))[:, :width]


class _JoinedInputs:
    """From embeddings and hidden vectors, `[num_tokens, hidden_size]`, to what attention reads and the stream."""

    def __init__(self, join: Linear, norm: Norm | None) -> None:
        self._join = join
        self._norm = norm

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self._join(torch.cat((embedded, hidden), dim=1))
        return stream if self._norm is None else self._norm(stream), stream


class _NormedJoinedInputs:
    def __init__(self, inputs: NormedJoin, join: Linear, norm: Norm | None) -> None:
        self._embedding_norm = make_norm(inputs.embedding)
        self._hidden_norm = make_norm(inputs.hidden)
        self._joined = _JoinedInputs(join, norm)

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._joined(self._embedding_norm(embedded), self._hidden_norm(hidden))


class _PairedInputs:
    def __init__(self, norms: PairNorms, eps: float) -> None:
        self._embedding_norm = RMSNorm(norms.embedding, eps)
        self._hidden_norm = RMSNorm(norms.hidden, eps)
        self._is_stream_normed = norms.is_stream_normed

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._hidden_norm(hidden)
        stream = normed.clone() if self._is_stream_normed else hidden.clone()
        return torch.cat((self._embedding_norm(embedded), normed), dim=1), stream


class DraftLayer:
    """A layer that was trained for one model, and predicts its next hidden vector. Holds weights only.

    Attributes:
        relative_cost: What a pass with scores takes, as a share of a step of the model, by their weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DraftLayerWeights,
        linears: LinearFactory,
        relative_cost: float,
        reduce: Linear | None = None,
    ) -> None:
        """Hold the weights; `reduce` makes one vector of the tapped layers, None reads the head's input."""
        self.config = config
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.weight.device
        self.relative_cost = relative_cost
        self._reduce = reduce
        self._rotations = weights.rotations
        parts = LayerParts.made_by(linears, self._rotations)
        head, eps = weights.head, weights.eps
        self._inputs = _make_inputs(weights, parts)
        self._embedding = weights.embedding
        self._layer = DecoderLayer(0, weights.layer, parts)
        self._head = head.matrix if isinstance(head.matrix, LMHead) else LMHead(parts.product(head.matrix), self.dtype)
        head_norm = None if head.norm is None else RMSNorm(head.norm, eps)
        self._yield_norm = head_norm if head.hands_on_normed else None
        self._head_norm = None if head.hands_on_normed else head_norm
        self._token_ids = head.token_ids
        self._downloads = Downloads(self.device)

    def forward(self, step: EntryStep) -> torch.Tensor:
        """Write the entries into the cache; return what they yield, `[num_tokens, hidden_size]`."""
        return self._compute(step, self._read(step.hidden))

    def draft(self, step: EntryStep, limits: Sequence[int], least_score: float) -> list[list[int]]:
        """Do the same, and draft behind the first sequences; return the likeliest chain of each.

        Nothing waits for the device before all depths have been launched.

        Args:
            step: The entries of the first sequences, and of any others.
            limits: The step's `limits`, on the host.
            least_score: A chain ends with the token that makes its log probability less than this.
        """
        assert step.limits is not None
        last = step.context.query_starts[1 : len(limits) + 1].long() - 1
        hidden = self.forward(step)[last]
        steps = SingleSteps(step.context, step.limits, max(limits) - 1)
        # The likeliest tokens of each depth, `[num_drafting]`.
        found: list[torch.Tensor] = []
        found_scores: list[torch.Tensor] = []
        for depth in range(max(limits)):
            token_ids, scores = self._likeliest(hidden)
            found.append(token_ids)
            found_scores.append(scores)
            if depth + 1 < max(limits):
                positions, context = steps.step(depth)
                hidden = self._compute(EntryStep(token_ids, hidden, positions, context), hidden)
        chains, totals = self._downloads.start(
            [torch.stack(found, 1), torch.stack(found_scores, 1).cumsum(dim=1)]
        ).wait()
        by_sequence = zip(chains.tolist(), totals.tolist(), limits, strict=True)
        return [_likely_part(chain[:limit], total, least_score) for chain, total, limit in by_sequence]

    def _compute(self, step: EntryStep, hidden: torch.Tensor) -> torch.Tensor:
        self._rotations.cover(step.positions)
        embedded = self._embedding(step.token_ids)
        x, stream = self._inputs(embedded, hidden.to(embedded.dtype))
        added = self._layer.add_to(stream, x, step.positions, step.context)
        return stream.add_(added) if self._yield_norm is None else self._yield_norm.add(added, stream)

    def _read(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._reduce is None:
            return hidden
        return self._reduce(hidden[:, self.config.hidden_size :].to(self.dtype))

    def _likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._head(hidden if self._head_norm is None else self._head_norm(hidden))
        scores, features = logits.max(dim=1)
        token_ids = features if self._token_ids is None else self._token_ids[features].long()
        return token_ids, scores - logits.logsumexp(dim=-1)


def _make_inputs(weights: DraftLayerWeights, parts: LayerParts) -> _JoinedInputs | _NormedJoinedInputs | _PairedInputs:
    inputs, before = weights.inputs, weights.layer.norms.before_mixer
    norm = None if before is None else make_norm(before)
    if isinstance(inputs, PairNorms):
        return _PairedInputs(inputs, weights.eps)
    if isinstance(inputs, NormedJoin):
        return _NormedJoinedInputs(inputs, parts.product(inputs.projection), norm)
    return _JoinedInputs(parts.product(inputs), norm)


def _likely_part(chain: list[int], totals: list[float], least_score: float) -> list[int]:
    """Return the tokens up to the one behind which the chain is no longer likely enough to go on."""
    for place, total in enumerate(totals[: len(chain)]):
        if total < least_score:
            return chain[: place + 1]
    return chain
