"""An EAGLE layer operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gpu_worker.layers.layer_weights import Projection
from gpu_worker.layers.layered_decoder import DecoderLayer
from gpu_worker.layers.rms_norm import RMSNorm
from gpu_worker.layers.vocabulary import LMHead
from gpu_worker.speculative.eagle.form import EagleStep, EagleWeights, PairNorms, Place
from gpu_worker.speculative.eagle.single_steps import SingleSteps
from kernels.linear import Linear, LinearFactory


class _Inputs(Protocol):
    """From embeddings and hidden vectors, `[num_tokens, hidden_size]`, to what attention reads and the stream."""

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class _Joined:
    """EAGLE and EAGLE-2."""

    def __init__(self, join: Linear, norm: RMSNorm | None) -> None:
        self._join = join
        self._norm = norm

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self._join(torch.cat((embedded, hidden), dim=1))
        return stream if self._norm is None else self._norm(stream), stream


class _Paired:
    """EAGLE-3."""

    def __init__(self, norms: PairNorms, eps: float) -> None:
        self._embedding_norm = RMSNorm(norms.embedding, eps)
        self._hidden_norm = RMSNorm(norms.hidden, eps)
        self._is_stream_normed = norms.is_stream_normed

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._hidden_norm(hidden)
        stream = normed.clone() if self._is_stream_normed else hidden.clone()
        return torch.cat((self._embedding_norm(embedded), normed), dim=1), stream


class LayeredEagle:
    """Holds weights only: every call's state is in its arguments."""

    def __init__(self, weights: EagleWeights, linears: LinearFactory) -> None:
        """Make the layer's operations."""

        def linear(projection: Projection) -> Linear:
            return linears.make(projection.weight, projection.bias)

        inputs, head, eps, dtype = weights.inputs, weights.head, weights.eps, weights.embedding.dtype
        norm = weights.layer.attention_norm
        if isinstance(inputs, PairNorms):
            self._inputs: _Inputs = _Paired(inputs, eps)
        else:
            join = linear(inputs)
            self._inputs = _Joined(join, None if norm is None else RMSNorm(norm, eps))
        self._embedding = weights.embedding
        self._layer = DecoderLayer(0, weights.layer, eps, linear)
        self._cos_sin = weights.cos_sin
        self._head = head.matrix if isinstance(head.matrix, LMHead) else LMHead(linear(head.matrix), dtype)
        self._head_norm = None if head.norm is None else RMSNorm(head.norm, eps)
        self._token_ids = head.token_ids

    def __call__(self, step: EagleStep) -> torch.Tensor:
        """Do what `EagleForm` promises."""
        embedded = torch.embedding(self._embedding, step.token_ids)
        x, stream = self._inputs(embedded, step.hidden.to(embedded.dtype))
        return stream.add_(self._layer.add_to(stream, x, step.positions, self._cos_sin, step.context))

    def foretell(
        self, step: EagleStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Place]]:
        """Do what `EagleForm` promises."""
        last = step.context.query_starts[1 : len(limits) + 1].long() - 1
        hidden = self(step)[last]
        steps = SingleSteps(step.context, len(limits), max(limits) - 1)
        found: list[list[Place]] = [[] for _ in limits]
        totals = [0.0] * len(limits)
        sequences = list(range(len(limits)))
        while True:
            token_ids, scores = self._candidates(hidden, num_candidates)
            kept = []
            for row, place in enumerate(zip(token_ids.tolist(), scores.tolist(), strict=True)):
                sequence = sequences[row]
                found[sequence].append(place)
                totals[sequence] += place[1][0]
                if len(found[sequence]) < limits[sequence] and totals[sequence] >= least_score:
                    kept.append(row)
            if not kept:
                return found
            depth = len(found[sequences[kept[0]]]) - 1
            sequences = [sequences[row] for row in kept]
            rows = None if len(kept) == len(limits) else torch.tensor(sequences, device=hidden.device)
            if len(kept) < len(hidden):
                chosen = torch.tensor(kept, device=hidden.device)
                token_ids, hidden = token_ids[chosen], hidden[chosen]
            hidden = self(EagleStep(token_ids[:, 0].contiguous(), hidden, *steps.step(depth, rows)))

    def _candidates(self, hidden: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return likely tokens and their log probabilities, `[num_rows, num_candidates]`."""
        logits = self._head(hidden if self._head_norm is None else self._head_norm(hidden))
        scores, features = logits.topk(min(num_candidates, logits.shape[1]))
        token_ids = features if self._token_ids is None else self._token_ids[features].long()
        return token_ids, scores - logits.logsumexp(dim=-1, keepdim=True)
