"""Whether whole steps are right: logits against transformers, tokens with and without graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_worker.models.decoder import CausalLM
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.random_model import random_model
from ops.bench.gpu.step.step_engine import PagedBatch, StepEngine
from ops.bench.gpu.step.transformers_peer import RoutedPeer, TransformersPeer

_NUM_DECODED = 3
# Scores of the last expert that is chosen and of the first that is not, apart by less: rounding may choose either.
_CLOSE = 1e-4
# Of the tokens, those that may be left out.
_MAX_LEFT_OUT = 0.1


class UnclearRoutingError(RuntimeError):
    """Too many tokens choose their experts by differences within rounding, so little would be compared."""


def cosine_error(device: torch.device, shape: ModelShape, lengths: tuple[int, ...]) -> float:
    """Return one minus the least cosine of a token's logits with those of transformers, in 16 bits."""
    model, weights = random_model(shape, max(lengths), device, keeps_tensors=True)
    peer = TransformersPeer(shape, weights.tensors, device)
    cosines = [
        F.cosine_similarity(ours, peer.logits(prompt).float(), dim=-1).min()
        for prompt, ours in _prompts_and_logits(model, lengths)
    ]
    return 1 - float(torch.stack(cosines).min())


def routed_error(device: torch.device, shape: ModelShape, lengths: tuple[int, ...]) -> float:
    """Return the largest relative error of a token's logits, in float32, over tokens whose routing is clear.

    In 16 bits two right implementations choose other experts for some tokens, whose scores differ by less than
    rounding; what such a token yields is then another vector. In float32 that is rare, and such tokens are left out.

    Raises:
        UnclearRoutingError: A tenth of the tokens is not clear.
    """
    model, weights = random_model(shape, max(lengths), device, torch.float32, keeps_tensors=True)
    peer = RoutedPeer(shape, weights.tensors, device)
    errors = []
    for prompt, ours in _prompts_and_logits(model, lengths):
        expected, margins = peer.logits_and_margins(prompt)
        clear = (ours - expected)[margins > _CLOSE].double().norm(dim=1)
        if len(clear) < (1 - _MAX_LEFT_OUT) * len(prompt):
            raise UnclearRoutingError(f"{len(prompt) - len(clear)} of {len(prompt)} tokens have no clear experts")
        errors.append((clear / expected[margins > _CLOSE].double().norm(dim=1)).max())
    return float(torch.stack(errors).max())


@torch.inference_mode()
def _prompts_and_logits(model: CausalLM, lengths: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute random prompts in two chunks side by side, then some decodes."""
    prompts = [torch.randint(model.config.vocab_size, (length,), device=model.device) for length in lengths]
    cache = StepEngine(model, len(lengths), max(lengths), has_graphs=False).cache
    batch = PagedBatch(model, cache, len(prompts), max(lengths))
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    firsts = [len(prompt) // 2 for prompt in prompts]
    seconds = [len(prompt) - first - _NUM_DECODED for prompt, first in zip(prompts, firsts, strict=True)]
    for counts in (firsts, seconds, *[[1] * len(prompts)] * _NUM_DECODED):
        token_ids = [prompt[done : done + n] for prompt, done, n in zip(prompts, computed, counts, strict=True)]
        computed = [done + n for done, n in zip(computed, counts, strict=True)]
        positions, context = batch.step(list(zip(counts, computed, strict=True)))
        logits = model.logits(model.forward(torch.cat(token_ids), positions, context))
        for part, rows in zip(parts, logits.split_with_sizes(counts), strict=True):
            part.append(rows)
    return list(zip(prompts, map(torch.cat, parts), strict=True))


def graphs_error(device: torch.device, shape: ModelShape, num_seqs: int, prompt_len: int, num_new: int) -> float:
    """Return the share of greedy tokens in 16 bits that differ between the engine with graphs and without."""
    model, _ = random_model(shape, prompt_len + num_seqs + num_new, device)
    tokens = []
    for has_graphs in (False, True):
        engine = StepEngine(model, num_seqs, model.config.max_model_len, has_graphs=has_graphs)
        # Of different lengths; the random prompts are the same for either engine.
        sequences = [engine.add(engine.random_prompt(prompt_len + index), num_new) for index in range(num_seqs)]
        engine.run()
        tokens.append(torch.tensor([sequence.token_ids[-num_new:] for sequence in sequences]))
    return float((tokens[0] != tokens[1]).double().mean())
