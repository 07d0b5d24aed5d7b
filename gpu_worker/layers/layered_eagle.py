"""An EAGLE layer operation by operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.eagle_form import EagleStep, EagleWeights, Place
from gpu_worker.layers.layered_decoder import DecoderLayer
from gpu_worker.layers.linear import make_linear
from gpu_worker.layers.single_steps import SingleSteps
from gpu_worker.layers.vocabulary import LMHead


class LayeredEagle:
    """Holds weights only: every call's state is in its arguments."""

    def __init__(self, weights: EagleWeights, head: LMHead) -> None:
        """Guess with the model's head."""
        self._embedding = weights.embedding
        self._join = make_linear(weights.join.weight, weights.join.bias)
        self._layer = DecoderLayer(0, weights.layer, weights.eps)
        self._cos_sin = weights.cos_sin
        self._head = head

    def __call__(self, step: EagleStep) -> torch.Tensor:
        """Do what `EagleForm` promises."""
        embedded = torch.embedding(self._embedding, step.token_ids)
        joined = self._join(torch.cat((embedded, step.hidden.to(embedded.dtype)), dim=1))
        added, stream = self._layer(joined, None, step.positions, self._cos_sin, step.context)
        return stream.add_(added)

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
        logits = self._head(hidden)
        scores, token_ids = logits.topk(min(num_candidates, logits.shape[1]))
        return token_ids, scores - logits.logsumexp(dim=-1, keepdim=True)
