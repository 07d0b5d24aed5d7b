"""Steps that verify drafts: what they take beside plain ones, and what that makes of drafts of a scripted quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, Clock
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.paged_batch import StaticStep
from ops.bench.gpu.step.random_model import random_model
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine
from ops.bench.gpu.step.step_floor import step_floor
from ops.bench.spec.scripted_drafts import ScriptedProposer

PLAIN = "no drafts"


def verification_case(
    device: torch.device, shape: ModelShape, num_seqs: int, context: int, num_steps: int, num_drafts: int
) -> Case:
    """Time steps whose drafts are all wrong, so that contexts grow as they do without; the floor is that of a decode.

    The plain engine has two steps in flight and hides the host's part, the verifying one has one and shows it.
    """
    max_model_len = context + 2 * num_steps + num_seqs + num_drafts + 16
    model, weights = random_model(shape, max_model_len, device)
    sizes = EngineSizes(num_seqs, max_model_len, num_drafts=num_drafts)
    verifying = StepEngine(model, sizes, ScriptedProposer(0.0, shape.vocab_size))
    plain = StepEngine(model, EngineSizes(num_seqs, max_model_len))
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
