"""Whole steps in the engine, of the device, and of peers.

Decodes, with drafts and without, and prompts; loads served to their ends; what the prefix cache costs and saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.models.decoder import CausalLM
from kernels.linear import Linear, LinearFactory
from kernels.linear.forms import INT4, DenseWeight, GroupQuantizedWeight, QuantizedWeight, ScaledWeight, WeightForm
from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, PLAIN, Case, Clock
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.random_model import RandomWeights, random_model
from ops.bench.gpu.step.step_engine import ScriptedProposer, StaticStep, StepEngine
from ops.bench.gpu.step.step_floor import step_floor
from ops.bench.gpu.step.transformers_peer import TransformersPeer, best_attention

# Steps over which the experts that are read are averaged.
_COUNTED_STEPS = 4
_SDPA = "transformers (sdpa)"


def decode_case(
    device: torch.device,
    shape: ModelShape,
    num_seqs: int,
    context: int,
    num_steps: int,
    num_peer_steps: int = 0,
    rounded: str | None = None,
) -> Case:
    """Time decode steps with `context` tokens a sequence on average; the floor has the experts that our own steps read.

    The peer, for dense models, is `generate_batch`; `rounded` rounds the weights as `RoundedLinears` does.
    """
    prompt_len = context - num_steps // 2
    # Sequences that are prefilled first decode while the others are.
    max_model_len = context + 2 * num_steps + num_seqs + _COUNTED_STEPS + 16
    linears = None if rounded is None else RoundedLinears(rounded)
    keeps = False if rounded else None
    model, weights = random_model(shape, max_model_len, device, keeps_tensors=keeps, linears=linears)
    engine = StepEngine(model, num_seqs, max_model_len)
    sequences = engine.fill(num_seqs, prompt_len)
    num_read = experts_read(model, engine.step, 0 if shape.is_dense else _COUNTED_STEPS)
    cached = sum(sequence.num_tokens for sequence in sequences) // num_seqs + num_steps // 2
    lengths = [(1, cached)] * num_seqs
    step = StaticStep(model, engine.cache, lengths, max_model_len)
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: engine.time_steps(num_steps),
        OURS_ON_DEVICE: step,
        "eager": step,
    }
    clocks = {OURS: Clock.OWN, "eager": Clock.EVENTS}
    if shape.is_dense and rounded is None:
        candidates["matrices"] = matrices(model, weights, num_seqs, num_seqs)
    if num_peer_steps:
        attention = best_attention()
        name = f"generate_batch ({attention})"
        prompts = [engine.random_prompt(prompt_len) for _ in range(num_seqs)]
        make_peer = partial(TransformersPeer, shape, weights.tensors, device, attention)
        candidates[name] = lambda _: make_peer().decode_steps(prompts, num_peer_steps)
        clocks[name] = Clock.OWN
    floor = step_floor(model.config, weights.sizes, lengths, num_read)
    num_bytes = floor.num_bytes - (0 if linears is None else linears.saved_bytes)
    return Case(num_bytes, floor.num_flops, 1, candidates, clocks=clocks, num_tokens=num_seqs)


def verification_case(
    device: torch.device, shape: ModelShape, num_seqs: int, context: int, num_steps: int, num_drafts: int
) -> Case:
    """Time steps whose drafts are all wrong, so that contexts grow as they do without; the floor is that of a decode.

    The plain engine has two steps in flight and hides the host's part, the verifying one has one and shows it.
    """
    max_model_len = context + 2 * num_steps + num_seqs + num_drafts + 16
    model, weights = random_model(shape, max_model_len, device)
    wrong = ScriptedProposer(0.0, shape.vocab_size)
    verifying = StepEngine(model, num_seqs, max_model_len, proposer=wrong, num_drafts=num_drafts)
    plain = StepEngine(model, num_seqs, max_model_len)
    prompt_len = context - num_steps // 2
    for engine in (verifying, plain):
        engine.fill(num_seqs, prompt_len)
    steps = {
        count: StaticStep(model, plain.cache, [(count, context + count)] * num_seqs, max_model_len, samples_all=True)
        for count in (1, 1 + num_drafts)
    }
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: verifying.time_steps(num_steps),
        OURS_ON_DEVICE: steps[1 + num_drafts],
        PLAIN: lambda _: plain.time_steps(num_steps),
        f"{PLAIN}/device": steps[1],
    }
    floor = step_floor(model.config, weights.sizes, [(1, context)] * num_seqs)
    return Case(floor.num_bytes, 0, 1, candidates, clocks={OURS: Clock.OWN, PLAIN: Clock.OWN})


def prefill_case(
    device: torch.device, shape: ModelShape, num_tokens: int, num_prompts: int, has_graphs: bool = False
) -> Case:
    """Time prompts of `num_tokens`, one after another, from an idle engine to their first token."""
    max_model_len = num_tokens + 1
    model, weights = random_model(shape, max_model_len, device)
    engine = StepEngine(model, 1, max_model_len, token_budget=num_tokens, has_graphs=has_graphs)
    first, *prompts = (engine.random_prompt(num_tokens) for _ in range(1 + num_prompts))
    num_read = experts_read(model, lambda: engine.serve_s([first], 1), 1)
    lengths = [(num_tokens, num_tokens)]
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: [engine.serve_s([prompt], 1) for prompt in prompts],
        OURS_ON_DEVICE: StaticStep(model, engine.cache, lengths, max_model_len),
    }
    clocks = {OURS: Clock.OWN, OURS_ON_DEVICE: Clock.EVENTS, _SDPA: Clock.EVENTS}
    if shape.is_dense:
        peer, token_ids = TransformersPeer(shape, weights.tensors, device), torch.tensor(first, device=device)
        candidates["matrices"] = matrices(model, weights, num_tokens, 1)
        candidates[_SDPA] = lambda _: peer.logits(token_ids, 1)
    floor = step_floor(model.config, weights.sizes, lengths, num_read)
    return Case(floor.num_bytes, floor.num_flops, 1, candidates, clocks=clocks, num_tokens=num_tokens)


def matrices(model: CausalLM, weights: RandomWeights, num_tokens: int, num_sampling: int) -> Callable[[int], object]:
    """Return a call that multiplies all of a step's matrices one after another, and does nothing else."""
    embedding, *layers = weights.matrices
    head = embedding if model.config.tie_word_embeddings else layers.pop()
    rows = {matrix.shape[1]: num_tokens for matrix in layers}
    inputs = {size: torch.randn(count, size, device=head.device).to(head.dtype) for size, count in rows.items()}
    last = torch.randn(num_sampling, head.shape[1], device=head.device).to(head.dtype)

    def multiply(_: int) -> torch.Tensor:
        for matrix in layers:
            F.linear(inputs[matrix.shape[1]], matrix)
        return F.linear(last, head)

    return multiply


def experts_read(model: CausalLM, run: Callable[[], object], num_runs: int) -> list[float]:
    """Run steps; return how many experts one reads on average, in each layer that has experts."""
    loads = model.expert_loads()
    totals = torch.zeros(0 if loads is None else len(loads.by_layer()), dtype=torch.float64)
    for _ in range(num_runs):
        before = [] if loads is None else _counted(model, loads.by_layer)
        run()
        after = [] if loads is None else _counted(model, loads.by_layer)
        totals += torch.tensor([int((now > then).sum()) for now, then in zip(after, before, strict=True)])
    return [float(total) for total in totals / num_runs]


def _counted(model: CausalLM, read: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return read()


ROUNDED = ("fp8", "int4")
"""Float8 with a scale a row, inputs rounded too; 4-bit integers in groups of 128, as GPTQ has them."""
_GROUP_SIZE = 128
# More rows than these are a vocabulary's, which checkpoints keep in 16 bits.
_MAX_ROWS = 65_536


class RoundedLinears(LinearFactory):
    """Makes layers of weights that it rounds; all have as many bits.

    Attributes:
        saved_bytes: Of the weights so far, less than they had.
    """

    def __init__(self, rounded: str) -> None:
        super().__init__(free_host_bytes)
        assert rounded in ROUNDED
        self._rounded = rounded
        self.saved_bytes = 0

    def make(self, weight: torch.Tensor | WeightForm, bias: torch.Tensor | None = None) -> Linear:
        """Do what `LinearFactory` does, with a weight that is rounded if it is plain."""
        plain = weight.weight if isinstance(weight, DenseWeight) else weight
        if not isinstance(plain, torch.Tensor) or plain.shape[0] > _MAX_ROWS:
            return super().make(weight, bias)
        form = self._form(plain)
        self.saved_bytes += plain.nbytes - form.num_bytes
        return super().make(form, bias)

    def _form(self, plain: torch.Tensor) -> QuantizedWeight:
        if self._rounded == "fp8":
            scales = plain.abs().amax(dim=1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
            return ScaledWeight((plain / scales).to(torch.float8_e4m3fn), scales, "dynamic")
        groups = plain.float().view(len(plain), -1, min(_GROUP_SIZE, plain.shape[1]))
        scales = groups.abs().amax(dim=2) / 7
        codes = ((groups / scales[..., None]).round() + 8).flatten(1).to(torch.uint8)
        values = codes[:, ::2] | codes[:, 1::2] << 4
        return GroupQuantizedWeight(values, INT4, groups.shape[2], scales, -8 * scales)


def throughput_case(
    device: torch.device, shape: ModelShape, num_seqs: int, prompt: int, new: int, has_peer: bool
) -> Case:
    """Serve a load from an idle engine to the last token.

    The floor is what the decodes read, or what the prompts multiply: no step overlaps the two, so it is a loose one.
    """
    max_model_len = prompt + new
    model, weights = random_model(shape, max_model_len, device)
    engine = StepEngine(model, num_seqs, max_model_len, is_warm=True)
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
    device: torch.device, shape: ModelShape, num_seqs: int, prompt: int, new: int, num_drafts: int, acceptance: float
) -> Case:
    """Serve a load with drafts of a scripted quality that cost nothing, and without; the floor has all right.

    Of the drafts behind accepted ones, a share of `acceptance` is accepted.
    """
    max_model_len = prompt + new + num_drafts
    model, weights = random_model(shape, max_model_len, device)

    def served(engine: StepEngine) -> Callable[[int], object]:
        return lambda _: [engine.serve_s([engine.random_prompt(prompt) for _ in range(num_seqs)], new)]

    make_engine = partial(StepEngine, model, num_seqs, max_model_len, is_warm=True)
    drafting = make_engine(proposer=ScriptedProposer(acceptance, shape.vocab_size), num_drafts=num_drafts)
    candidates = {OURS: served(drafting), PLAIN: served(make_engine())}
    num_steps = -(-new // (1 + num_drafts))
    num_bytes = num_steps * step_floor(model.config, weights.sizes, []).num_bytes
    clocks = dict.fromkeys(candidates, Clock.OWN)
    return Case(num_bytes, 0, 1, candidates, clocks=clocks, num_tokens=num_seqs * new)


def prefix_cache_case(device: torch.device, shape: ModelShape, num_tokens: int, num_prompts: int) -> Case:
    """Time a prompt's first token: new to the cache, without a cache, and all but a hundredth of it in the cache."""
    max_model_len = num_tokens + 1
    model, weights = random_model(shape, max_model_len, device)

    def make_engine(has_prefix_cache: bool) -> StepEngine:
        engine = StepEngine(
            model, 2, max_model_len, token_budget=num_tokens, has_graphs=False, has_prefix_cache=has_prefix_cache
        )
        engine.serve_s([engine.random_prompt(num_tokens)], 1)
        return engine

    engines = {has_cache: make_engine(has_cache) for has_cache in (True, False)}

    def first_tokens(has_cache: bool) -> list[float]:
        engine = engines[has_cache]
        return [engine.serve_s([engine.random_prompt(num_tokens)], 1) for _ in range(num_prompts)]

    def hits(_: int) -> list[float]:
        engine, shared = engines[True], num_tokens * 99 // 100
        known = engine.random_prompt(num_tokens)
        engine.serve_s([known], 1)
        prompts = [known[:shared] + engine.random_prompt(num_tokens - shared) for _ in range(num_prompts)]
        return [engine.serve_s([prompt], 1) for prompt in prompts]

    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: first_tokens(True),
        "no prefix cache": lambda _: first_tokens(False),
        f"{OURS}/99% hits": hits,
    }
    floor = step_floor(model.config, weights.sizes, [(num_tokens, num_tokens)])
    return Case(0, floor.num_flops, 1, candidates, clocks=dict.fromkeys(candidates, Clock.OWN))
