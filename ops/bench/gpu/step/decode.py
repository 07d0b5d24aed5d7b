"""A decode step: what it takes in the engine, what the device needs of that, and what peers need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, Clock
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.paged_batch import StaticStep
from ops.bench.gpu.step.random_model import RandomWeights, random_model
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine
from ops.bench.gpu.step.transformers_peer import TransformersPeer, best_attention


def decode_case(
    device: torch.device, shape: ModelShape, num_seqs: int, context: int, num_steps: int, num_peer_steps: int = 0
) -> Case:
    """Time decode steps; the floor is the reading of the weights, and of the keys and values of all sequences.

    Args:
        device: To run on.
        shape: Of the model.
        num_seqs: Sequences that decode together.
        context: Tokens that each has, on average over the timed steps.
        num_steps: Of ours that are timed.
        num_peer_steps: Of `generate_batch`; 0 leaves it out.
    """
    prompt_len = context - num_steps // 2
    # Sequences that are prefilled first decode while the others are.
    max_model_len = context + 2 * num_steps + num_seqs + 16
    model, weights = random_model(shape, max_model_len, device)
    engine = StepEngine(model, EngineSizes(num_seqs, max_model_len))
    sequences = engine.fill(num_seqs, prompt_len)
    num_cached = sum(sequence.num_tokens for sequence in sequences) + num_seqs * num_steps // 2
    step = StaticStep(model, engine.cache, [(1, num_cached // num_seqs)] * num_seqs, max_model_len)
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: engine.time_steps(num_steps),
        OURS_ON_DEVICE: step,
        "eager": step,
        "matrices": matrices(shape, weights, num_seqs, num_seqs),
    }
    clocks = {OURS: Clock.OWN, "eager": Clock.EVENTS}
    if num_peer_steps:
        attention = best_attention()
        name = f"generate_batch ({attention})"
        prompts = [engine.random_prompt(prompt_len) for _ in range(num_seqs)]
        candidates[name] = partial(
            _peer_steps, shape, weights, device, max_model_len, attention, prompts, num_peer_steps
        )
        clocks[name] = Clock.OWN
    num_bytes = 2 * (shape.layer_parameters + shape.head_parameters) + num_cached * shape.kv_bytes_per_token
    return Case(num_bytes, 0, 1, candidates, clocks=clocks, num_tokens=num_seqs)


def matrices(shape: ModelShape, weights: RandomWeights, num_tokens: int, num_sampling: int) -> Callable[[int], object]:
    """Return a call that multiplies all of a step's matrices one after another, and does nothing else."""
    embedding, *layers = weights.matrices
    head = embedding if shape.ties_embeddings else layers.pop()
    rows = {matrix.shape[1]: num_tokens for matrix in layers}
    inputs = {size: torch.randn(count, size, device=head.device).to(head.dtype) for size, count in rows.items()}
    last = torch.randn(num_sampling, head.shape[1], device=head.device).to(head.dtype)

    def multiply(_: int) -> torch.Tensor:
        for matrix in layers:
            F.linear(inputs[matrix.shape[1]], matrix)
        return F.linear(last, head)

    return multiply


def _peer_steps(
    shape: ModelShape,
    weights: RandomWeights,
    device: torch.device,
    max_model_len: int,
    attention: str,
    prompts: list[list[int]],
    num_steps: int,
    _: int,
) -> list[float]:
    return TransformersPeer(shape, weights.tensors, device, max_model_len, attention).decode_steps(prompts, num_steps)
