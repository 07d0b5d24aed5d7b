"""Whether whole steps are right, on two layers: logits against transformers, tokens with and without graphs."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.models.decoder import CausalLM
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.paged_batch import PagedBatch
from ops.bench.gpu.step.random_model import random_model
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine
from ops.bench.gpu.step.transformers_peer import TransformersPeer

_NUM_LAYERS = 2
_NUM_DECODED = 3


def logits_error(device: torch.device, shape: ModelShape, lengths: tuple[int, ...]) -> float:
    """Return one minus the least cosine of a token's logits with those of transformers.

    Prompts are computed in chunks, beside one another, and their last tokens as decodes.
    """
    shape = replace(shape, num_layers=_NUM_LAYERS)
    max_len = max(lengths)
    model, weights = random_model(shape, max_len, device)
    peer = TransformersPeer(shape, weights.tensors, device, max_len)
    prompts = [torch.randint(shape.vocab_size, (length,), device=device) for length in lengths]
    cache = StepEngine(model, EngineSizes(len(lengths), max_len, has_graphs=False)).cache
    actual = paged_logits(model, cache, prompts)
    expected = [peer.logits(prompt).float() for prompt in prompts]
    cosines = [F.cosine_similarity(ours, theirs, dim=-1).min() for ours, theirs in zip(actual, expected, strict=True)]
    return 1 - float(torch.stack(cosines).min())


@torch.inference_mode()
def paged_logits(model: CausalLM, cache: KVCache, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of prompts, each computed in two chunks, but for its last tokens, which are decodes."""
    batch = PagedBatch(cache, len(prompts), max(map(len, prompts)))
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
    return [torch.cat(part) for part in parts]


def graphs_error(device: torch.device, shape: ModelShape, num_seqs: int, prompt_len: int, num_new: int) -> float:
    """Return the share of greedy tokens that differ between the engine with graphs and without."""
    model, _ = random_model(replace(shape, num_layers=_NUM_LAYERS), prompt_len + num_seqs + num_new, device)
    return share_of_other_tokens(model, num_seqs, prompt_len, num_new)


def share_of_other_tokens(model: CausalLM, num_seqs: int, prompt_len: int, num_new: int) -> float:
    """Return the share of a model's greedy tokens that differ between the engine with graphs and without."""
    tokens = []
    for has_graphs in (False, True):
        sizes = EngineSizes(num_seqs, model.config.max_model_len, has_graphs=has_graphs)
        engine = StepEngine(model, sizes)
        # Of different lengths; the random prompts are the same for either engine.
        sequences = [engine.add(engine.random_prompt(prompt_len + index), num_new) for index in range(num_seqs)]
        engine.run()
        tokens.append(torch.tensor([sequence.token_ids[-num_new:] for sequence in sequences]))
    return float((tokens[0] != tokens[1]).double().mean())
