"""Steps of models in published shapes: mixtures of experts, latent attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_worker.models.decoder import CausalLM
from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, Clock
from ops.bench.gpu.published import PublishedShape
from ops.bench.gpu.step.paged_batch import StaticStep
from ops.bench.gpu.step.published_model import published_model
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine
from ops.bench.gpu.step.step_floor import step_floor

# Steps over which the experts that are read are averaged.
_COUNTED_STEPS = 4


def published_decode_case(
    device: torch.device, shape: PublishedShape, num_seqs: int, context: int, num_steps: int
) -> Case:
    """Time decode steps; the floor has the experts that the engine's own steps have read.

    Args:
        device: To run on.
        shape: Of the model.
        num_seqs: Sequences that decode together.
        context: Tokens that each has, on average over the timed steps.
        num_steps: That are timed.
    """
    prompt_len = context - num_steps // 2
    # Sequences that are prefilled first decode while the others are.
    max_model_len = context + 2 * num_steps + num_seqs + _COUNTED_STEPS + 16
    model, weights = published_model(shape, max_model_len, device)
    engine = StepEngine(model, EngineSizes(num_seqs, max_model_len))
    sequences = engine.fill(num_seqs, prompt_len)
    num_read = experts_read(model, engine.step, _COUNTED_STEPS)
    cached = sum(sequence.num_tokens for sequence in sequences) // num_seqs + num_steps // 2
    lengths = [(1, cached)] * num_seqs
    step = StaticStep(model, engine.cache, lengths, max_model_len)
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: engine.time_steps(num_steps),
        OURS_ON_DEVICE: step,
        "eager": step,
    }
    floor = step_floor(model.config, weights.sizes, lengths, num_read)
    clocks = {OURS: Clock.OWN, "eager": Clock.EVENTS}
    return Case(floor.num_bytes, floor.num_flops, 1, candidates, clocks=clocks, num_tokens=num_seqs)


def published_prefill_case(device: torch.device, shape: PublishedShape, num_tokens: int, num_prompts: int) -> Case:
    """Time prompts of `num_tokens`, one after another, from an idle engine to their first token."""
    max_model_len = num_tokens + 1
    model, weights = published_model(shape, max_model_len, device)
    engine = StepEngine(model, EngineSizes(1, max_model_len, token_budget=num_tokens, has_graphs=False))
    first, *prompts = (engine.random_prompt(num_tokens) for _ in range(1 + num_prompts))
    num_read = experts_read(model, lambda: engine.time_to_first_token(first), 1)
    lengths = [(num_tokens, num_tokens)]
    floor = step_floor(model.config, weights.sizes, lengths, num_read)
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: [engine.time_to_first_token(prompt) for prompt in prompts],
        OURS_ON_DEVICE: StaticStep(model, engine.cache, lengths, max_model_len),
    }
    clocks = {OURS: Clock.OWN, OURS_ON_DEVICE: Clock.EVENTS}
    return Case(floor.num_bytes, floor.num_flops, 1, candidates, clocks=clocks, num_tokens=num_tokens)


def experts_read(model: CausalLM, run: Callable[[], object], num_runs: int) -> list[float]:
    """Return how many experts a run of one step reads on average, in each layer that has experts."""
    loads = model.expert_loads()
    if loads is None:
        return []
    totals = torch.zeros(len(loads.by_layer()), dtype=torch.float64)
    before = _counted(model, loads.by_layer)
    for _ in range(num_runs):
        run()
        after = _counted(model, loads.by_layer)
        totals += torch.tensor([int((now > then).sum()) for now, then in zip(after, before, strict=True)])
        before = after
    return [float(total) for total in totals / num_runs]


def _counted(model: CausalLM, read: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Read counters when all that was submitted is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return read()
