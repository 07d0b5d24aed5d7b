"""A prefill step: a whole prompt at once, from an idle engine to its first token."""

from __future__ import annotations

import torch

from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, Clock
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.decode import matrices
from ops.bench.gpu.step.paged_batch import StaticStep
from ops.bench.gpu.step.random_model import random_model
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine
from ops.bench.gpu.step.transformers_peer import TransformersPeer


def prefill_case(device: torch.device, shape: ModelShape, num_tokens: int, num_prompts: int) -> Case:
    """Time prompts of `num_tokens`, one after another; the floor is the multiplications, or the weights' reading."""
    max_model_len = num_tokens + 1
    model, weights = random_model(shape, max_model_len, device)
    engine = StepEngine(model, EngineSizes(1, max_model_len, token_budget=num_tokens, has_graphs=False))
    engine.time_to_first_token(engine.random_prompt(num_tokens))
    prompts = [engine.random_prompt(num_tokens) for _ in range(num_prompts)]
    peer = TransformersPeer(shape, weights.tensors, device, max_model_len)
    token_ids = torch.tensor(prompts[0], device=device)
    return Case(
        2 * (shape.layer_parameters + shape.head_parameters),
        prefill_flops(shape, num_tokens),
        1,
        {
            OURS: lambda _: [engine.time_to_first_token(prompt) for prompt in prompts],
            OURS_ON_DEVICE: StaticStep(model, engine.cache, [(num_tokens, num_tokens)], max_model_len),
            "matrices": matrices(shape, weights, num_tokens, 1),
            "transformers (sdpa)": lambda _: peer.logits(token_ids, 1),
        },
        clocks={OURS: Clock.OWN, OURS_ON_DEVICE: Clock.EVENTS, "transformers (sdpa)": Clock.EVENTS},
        num_tokens=num_tokens,
    )


def prefill_flops(shape: ModelShape, num_tokens: int) -> int:
    """Return the operations of one prompt: the matrices, and attention over the pairs that causality leaves."""
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = 4 * pairs * shape.num_layers * shape.num_heads * shape.head_dim
    return 2 * (num_tokens * shape.layer_parameters + shape.head_parameters) + attention
