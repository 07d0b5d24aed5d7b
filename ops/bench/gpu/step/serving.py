"""Loads of many steps: prompts served to their ends, with drafts and without; what the prefix cache costs and saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ops.bench.gpu.case import OURS, PLAIN, Case, Clock
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.random_model import random_model
from ops.bench.gpu.step.step_engine import EngineSizes, ScriptedProposer, StepEngine
from ops.bench.gpu.step.step_floor import step_floor
from ops.bench.gpu.step.transformers_peer import TransformersPeer, best_attention


def throughput_case(
    device: torch.device, shape: ModelShape, num_seqs: int, prompt: int, new: int, has_peer: bool
) -> Case:
    """Serve a load from an idle engine to the last token.

    The floor is what the decodes read, or what the prompts multiply: no step overlaps the two, so it is a loose one.
    """
    max_model_len = prompt + new
    model, weights = random_model(shape, max_model_len, device)
    engine = StepEngine(model, EngineSizes(num_seqs, max_model_len, is_warm=True))
    prompts = [engine.random_prompt(prompt) for _ in range(num_seqs)]

    candidates: dict[str, Callable[[int], object]] = {OURS: lambda _: [engine.serve_s(prompts, new)]}
    unavailable = {}
    if has_peer:
        name = f"generate_batch ({best_attention()})"
        peer = TransformersPeer(shape, weights.tensors, device, best_attention())
        candidates[name] = lambda _: [peer.serve_s(prompts, new)]
    else:
        unavailable["generate_batch"] = "left out of this load, which would take it too long; see the smaller one"
    contexts = num_seqs * sum(range(prompt, prompt + new))
    weights_once, all_contexts, one_prompt = (
        step_floor(model.config, weights.sizes, lengths) for lengths in ([], [(1, contexts)], [(prompt, prompt)])
    )
    return Case(
        (new - 1) * weights_once.num_bytes + all_contexts.num_bytes,
        num_seqs * one_prompt.num_flops,
        1,
        candidates,
        unavailable,
        dict.fromkeys(candidates, Clock.OWN),
        num_seqs * new,
    )


def scripted_case(
    device: torch.device,
    shape: ModelShape,
    num_seqs: int,
    prompt: int,
    new: int,
    num_drafts: int,
    acceptance: float,
) -> Case:
    """Serve a load with drafts of a scripted quality that cost nothing, and without; the floor has all right.

    Of the drafts behind accepted ones, a share of `acceptance` is accepted.
    """
    max_model_len = prompt + new + num_drafts
    model, weights = random_model(shape, max_model_len, device)

    def served(engine: StepEngine) -> Callable[[int], object]:
        return lambda _: [engine.serve_s([engine.random_prompt(prompt) for _ in range(num_seqs)], new)]

    sizes = EngineSizes(num_seqs, max_model_len, is_warm=True)
    drafting = StepEngine(model, replace(sizes, num_drafts=num_drafts), ScriptedProposer(acceptance, shape.vocab_size))
    candidates = {OURS: served(drafting), PLAIN: served(StepEngine(model, sizes))}
    num_steps = -(-new // (1 + num_drafts))
    num_bytes = num_steps * step_floor(model.config, weights.sizes, []).num_bytes
    clocks = dict.fromkeys(candidates, Clock.OWN)
    return Case(num_bytes, 0, 1, candidates, clocks=clocks, num_tokens=num_seqs * new)


def prefix_cache_case(device: torch.device, shape: ModelShape, num_tokens: int, num_prompts: int) -> Case:
    """Time a prompt's first token: new to the cache, without a cache, and all but a hundredth of it in the cache."""
    max_model_len = num_tokens + 1
    model, weights = random_model(shape, max_model_len, device)

    def make_engine(has_prefix_cache: bool) -> StepEngine:
        sizes = EngineSizes(
            2, max_model_len, token_budget=num_tokens, has_graphs=False, has_prefix_cache=has_prefix_cache
        )
        engine = StepEngine(model, sizes)
        engine.time_to_first_token(engine.random_prompt(num_tokens))
        return engine

    engines = {has_cache: make_engine(has_cache) for has_cache in (True, False)}

    def first_tokens(has_cache: bool) -> list[float]:
        engine = engines[has_cache]
        return [engine.time_to_first_token(engine.random_prompt(num_tokens)) for _ in range(num_prompts)]

    def hits(_: int) -> list[float]:
        engine, shared = engines[True], num_tokens * 99 // 100
        known = engine.random_prompt(num_tokens)
        engine.time_to_first_token(known)
        prompts = [known[:shared] + engine.random_prompt(num_tokens - shared) for _ in range(num_prompts)]
        return [engine.time_to_first_token(prompt) for prompt in prompts]

    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: first_tokens(True),
        "no prefix cache": lambda _: first_tokens(False),
        f"{OURS}/99% hits": hits,
    }
    floor = step_floor(model.config, weights.sizes, [(num_tokens, num_tokens)])
    return Case(0, floor.num_flops, 1, candidates, clocks=dict.fromkeys(candidates, Clock.OWN))
