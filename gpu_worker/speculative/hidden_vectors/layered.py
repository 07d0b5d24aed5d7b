"""A layer that predicts hidden vectors, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import structs

from gpu_worker.execution.batch.transfers import Downloads
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer import DecoderLayer
from gpu_worker.layers.linear import LayerParts
from gpu_worker.layers.norms import Norm, RMSNorm, make_norm
from gpu_worker.layers.vocabulary import LMHead
from gpu_worker.speculative.hidden_vectors.form import Candidates, DraftLayerWeights, EntryStep, NormedJoin, PairNorms
from kernels.linear import Linear, LinearFactory

# Kernels are compiled anew for a pointer that is aligned otherwise: the numbers of each step begin on a multiple.
_ALIGNED_ITEMS = 16


class SingleSteps:
    """Positions and slots of the next tokens of a batch, one token of each sequence a step.

    A sequence takes part in one step for each draft token behind its first. In later steps it is padding.
    """

    def __init__(self, context: AttentionContext, limits: torch.Tensor, num_steps: int) -> None:
        """Continue the first sequences of `context` by `num_steps`; `limits` are their most draft tokens."""
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


class _Inputs(Protocol):
    """From embeddings and hidden vectors, `[num_tokens, hidden_size]`, to what attention reads and the stream."""

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class _JoinedInputs:
    """EAGLE and EAGLE-2."""

    def __init__(self, join: Linear, norm: Norm | None) -> None:
        self._join = join
        self._norm = norm

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self._join(torch.cat((embedded, hidden), dim=1))
        return stream if self._norm is None else self._norm(stream), stream


class _NormedJoinedInputs:
    """Heads that checkpoints hold beside their model."""

    def __init__(self, inputs: NormedJoin, join: Linear, norm: Norm | None) -> None:
        self._embedding_norm = make_norm(inputs.embedding)
        self._hidden_norm = make_norm(inputs.hidden)
        self._joined = _JoinedInputs(join, norm)

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._joined(self._embedding_norm(embedded), self._hidden_norm(hidden))


class _PairedInputs:
    """EAGLE-3."""

    def __init__(self, norms: PairNorms, eps: float) -> None:
        self._embedding_norm = RMSNorm(norms.embedding, eps)
        self._hidden_norm = RMSNorm(norms.hidden, eps)
        self._is_stream_normed = norms.is_stream_normed

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._hidden_norm(hidden)
        stream = normed.clone() if self._is_stream_normed else hidden.clone()
        return torch.cat((self._embedding_norm(embedded), normed), dim=1), stream


class LayeredForm:
    """Holds weights only: every call's state is in its arguments."""

    def __init__(self, weights: DraftLayerWeights, linears: LinearFactory) -> None:
        self._rotations = weights.rotations
        parts = LayerParts.made_by(linears, self._rotations)
        inputs, head, eps, dtype = weights.inputs, weights.head, weights.eps, weights.embedding.dtype
        before = weights.layer.norms.before_mixer
        norm = None if before is None else make_norm(before)
        if isinstance(inputs, PairNorms):
            self._inputs: _Inputs = _PairedInputs(inputs, eps)
        elif isinstance(inputs, NormedJoin):
            self._inputs = _NormedJoinedInputs(inputs, parts.product(inputs.projection), norm)
        else:
            self._inputs = _JoinedInputs(parts.product(inputs), norm)
        self._embedding = weights.embedding
        self._layer = DecoderLayer(0, weights.layer, parts)
        self._head = head.matrix if isinstance(head.matrix, LMHead) else LMHead(parts.product(head.matrix), dtype)
        head_norm = None if head.norm is None else RMSNorm(head.norm, eps)
        self._yield_norm = head_norm if head.hands_on_normed else None
        self._head_norm = None if head.hands_on_normed else head_norm
        self._token_ids = head.token_ids
        self._downloads = Downloads(weights.embedding.weight.device)

    def __call__(self, step: EntryStep) -> torch.Tensor:
        """Do what `LayerForm` promises."""
        self._rotations.cover(step.positions)
        embedded = self._embedding(step.token_ids)
        x, stream = self._inputs(embedded, step.hidden.to(embedded.dtype))
        added = self._layer.add_to(stream, x, step.positions, step.context)
        return stream.add_(added) if self._yield_norm is None else self._yield_norm.add(added, stream)

    def draft(
        self, step: EntryStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Candidates]]:
        """Do what `LayerForm` promises. Nothing waits for the device before all depths have been launched."""
        assert step.limits is not None
        last = step.context.query_starts[1 : len(limits) + 1].long() - 1
        hidden = self(step)[last]
        steps = SingleSteps(step.context, step.limits, max(limits) - 1)
        # The candidates of each depth, `[num_drafting, num_candidates]`.
        found: list[torch.Tensor] = []
        found_scores: list[torch.Tensor] = []
        for depth in range(max(limits)):
            token_ids, scores = self._candidates(hidden, num_candidates)
            found.append(token_ids)
            found_scores.append(scores)
            if depth + 1 < max(limits):
                hidden = self(EntryStep(token_ids[:, 0].contiguous(), hidden, *steps.step(depth)))
        token_ids, scores = self._downloads.start([torch.stack(found, 1), torch.stack(found_scores, 1)]).wait()
        by_sequence = zip(token_ids.tolist(), scores.tolist(), limits, strict=True)
        return [
            _likely_part(ids[:limit], log_probabilities, least_score) for ids, log_probabilities, limit in by_sequence
        ]

    def _candidates(self, hidden: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return likely tokens and their log probabilities, `[num_rows, num_candidates]`."""
        logits = self._head(hidden if self._head_norm is None else self._head_norm(hidden))
        scores, features = logits.topk(min(num_candidates, logits.shape[1]))
        token_ids = features if self._token_ids is None else self._token_ids[features].long()
        return token_ids, scores - logits.logsumexp(dim=-1, keepdim=True)


def _likely_part(token_ids: list[list[int]], scores: list[list[float]], least_score: float) -> list[Candidates]:
    """Return the candidates of a sequence up to the depth where its chain is no longer likely enough to go on."""
    part: list[Candidates] = []
    total = 0.0
    for candidates in zip(token_ids, scores, strict=False):
        part.append(candidates)
        total += candidates[1][0]
        if total < least_score:
            break
    return part
