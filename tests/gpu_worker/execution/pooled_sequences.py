"""Sequences that get vectors or scores, and what `transformers` computes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from shared.messages import Lane
from shared.sampling import Sampling


def sequence_of(name: str, prompt: list[int], plan: PoolingPlan, lane: Lane = "interactive") -> Sequence:
    return Sequence(name, prompt, len(prompt), Sampling(max_tokens=0), max_tokens=0, pooling=plan, lane=lane)


def answer(sequence: Sequence) -> Any:
    """Return the sum of what its chunks gave."""
    return np.sum([np.frombuffer(part, dtype=np.float64) for part in sequence.pooled], axis=0)


@torch.no_grad()
def assert_vectors(model: Any, sequences: list[Sequence], head: Any = None) -> None:
    """Assert that answers are what the layers give, or a head behind them; of means they are sums."""
    for sequence in sequences:
        plan = sequence.pooling
        assert plan is not None
        assert sequence.num_output_tokens == 0
        assert len(sequence.pooled) == 1 or not plan.is_whole
        hidden = model(torch.tensor([sequence.token_ids])).last_hidden_state[0]
        expected = hidden.mean(0) if plan.rows == "mean" else hidden[0 if plan.rows == "first" else -1]
        if plan.readout != "hidden":
            expected = head(expected)[list(plan.readout)]
        count = sequence.num_prompt_tokens if plan.rows == "mean" else 1
        np.testing.assert_allclose(answer(sequence) / count, expected.numpy(), atol=1e-4, rtol=0)


@torch.no_grad()
def assert_logits(model: Any, sequence: Sequence, **inputs: Any) -> None:
    expected = model(torch.tensor([sequence.token_ids]), **inputs).logits[0].numpy()
    np.testing.assert_allclose(answer(sequence), expected, atol=1e-4, rtol=0)
