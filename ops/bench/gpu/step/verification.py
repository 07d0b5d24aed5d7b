"""Steps that verify drafts: what they take beside plain ones, and what that makes of drafts of a scripted quality."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, Clock
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.paged_batch import StaticStep
from ops.bench.gpu.step.random_model import random_model
from ops.bench.gpu.step.scripted_drafts import ScriptedProposer
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine

PLAIN = "no drafts"


@dataclass(frozen=True, slots=True)
class VerificationLoad:
    """Sequences that decode together, each with `num_drafts` drafts a step, as `DecodeLoad` otherwise."""

    num_seqs: int
    context: int
    num_steps: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class ScriptedLoad:
    """Sequences that arrive at once; `acceptance` is the share of drafts behind accepted ones that are accepted."""

    num_seqs: int
    prompt: int
    new: int
    num_drafts: int
    acceptance: float


def verification_case(device: torch.device, shape: ModelShape, load: VerificationLoad) -> Case:
    """Time steps whose drafts are all wrong, so that contexts grow as they do without; the floor is that of a decode.

    The plain engine has two steps in flight and hides the host's part, the verifying one has one and shows it.
    """
    num_seqs, num_steps = load.num_seqs, load.num_steps
    max_model_len = load.context + 2 * num_steps + num_seqs + load.num_drafts + 16
    model, _ = random_model(shape, max_model_len, device)
    sizes = EngineSizes(num_seqs, max_model_len, num_drafts=load.num_drafts)
    verifying = StepEngine(model, sizes, ScriptedProposer(0.0, shape.vocab_size))
    plain = StepEngine(model, EngineSizes(num_seqs, max_model_len))
    prompt_len = load.context - num_steps // 2
    for engine in (verifying, plain):
        engine.fill(num_seqs, prompt_len)
    steps = {
        count: StaticStep(
            model, plain.cache, [(count, load.context + count)] * num_seqs, max_model_len, samples_all=True
        )
        for count in (1, 1 + load.num_drafts)
    }
    candidates: dict[str, Callable[[int], object]] = {
        OURS: lambda _: verifying.time_steps(num_steps),
        OURS_ON_DEVICE: steps[1 + load.num_drafts],
        PLAIN: lambda _: plain.time_steps(num_steps),
        f"{PLAIN}/device": steps[1],
    }
    weight_bytes = 2 * (shape.layer_parameters + shape.head_parameters)
    num_bytes = weight_bytes + num_seqs * load.context * shape.kv_bytes_per_token
    return Case(num_bytes, 0, 1, candidates, clocks={OURS: Clock.OWN, PLAIN: Clock.OWN})


def scripted_case(device: torch.device, shape: ModelShape, load: ScriptedLoad) -> Case:
    """Serve a load with drafts of a scripted quality that cost nothing, and without; the floor has all right."""
    max_model_len = load.prompt + load.new + load.num_drafts
    model, _ = random_model(shape, max_model_len, device)

    def engine(num_drafts: int) -> Callable[[int], object]:
        proposer = ScriptedProposer(load.acceptance, shape.vocab_size) if num_drafts else None
        sizes = EngineSizes(load.num_seqs, max_model_len, is_warm=True, num_drafts=num_drafts)
        made = StepEngine(model, sizes, proposer)
        return lambda _: [_serve_s(made, load)]

    candidates = {OURS: engine(load.num_drafts), PLAIN: engine(0)}
    num_steps = -(-load.new // (1 + load.num_drafts))
    num_bytes = num_steps * 2 * (shape.layer_parameters + shape.head_parameters)
    clocks = dict.fromkeys(candidates, Clock.OWN)
    return Case(num_bytes, 0, 1, candidates, clocks=clocks, num_tokens=load.num_seqs * load.new)


def _serve_s(engine: StepEngine, load: ScriptedLoad) -> float:
    prompts = [engine.random_prompt(load.prompt) for _ in range(load.num_seqs)]
    started = time.perf_counter()
    for prompt in prompts:
        engine.add(prompt, load.new)
    engine.run()
    return time.perf_counter() - started
