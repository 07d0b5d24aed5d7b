"""Engines of every combination of factors, over tiny models that are loaded once.

The model's head is sharp for a few tokens only, so random heads and layers draft some of them rightly by chance. Its
second layer says less than its first, so the first alone drafts well; the draft model is the model, a little changed.
Blocks that were never written hold NaN, which would end every request that reads them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.core.adaptive_depth import AdaptiveDepth
from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step_costs import FIRST_PLAIN_STEPS, MEASURED_STEPS
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import KV_CACHE_DTYPES, RunnerConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from gpu_worker.speculative.draft_model.proposer import DraftModelProposer
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.execution.device_runs import load, make_device_runner, poisoned_cache
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer, HostileProposer
from tests.gpu_worker.execution.engine_run import BLOCK, VOCAB, save_tiny_model
from tests.gpu_worker.matrix.factors import PLAIN, EngineCell
from tests.gpu_worker.speculative.draft_files import (
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    save_draft,
)

SIZE = 48
DEPTH = 5
MAX_LEN = 39
NUM_BLOCKS = 400
NUM_SCARCE_BLOCKS = 11
MAX_NUM_SEQS = {"large": 40, "small": 6}
TOKEN_BUDGETS = {"large": 400, "small": 13}
NUM_SHARP_TOKENS = 10

Runner = TorchModelRunner
Answers = Mapping[str, list[int]]

SCRIPTED: dict[str, type[ChainProposer]] = {"chains": ChainProposer, "hostile": HostileProposer}


@dataclass(frozen=True)
class Models:
    """What is loaded once, and where heads and layers are.

    Attributes:
        tapped: The target, for a layer that listens to more than what it ends with.
    """

    target: CausalLM
    tapped: CausalLM
    draft: CausalLM
    directory: Path


@dataclass(frozen=True)
class Parts:
    """An engine's parts. Without a proposer it decodes plainly."""

    scheduler: Scheduler
    runner: Runner
    proposer: Proposer | None


def save_models(directory: Path, save: Callable[[Path], Any] = save_tiny_model) -> Models:
    """Save a model and what drafts for it, and load both models; `save` makes one of two layers."""
    model = save(directory / "target")
    model.config.max_position_embeddings = MAX_LEN
    with torch.no_grad():
        model.lm_head.weight[:NUM_SHARP_TOKENS] *= 1.5
        model.lm_head.weight[NUM_SHARP_TOKENS:] *= 0.2
        model.model.layers[1].self_attn.o_proj.weight *= 0.5
        for name, parameter in model.model.layers[1].named_parameters():
            if "down_proj" in name:
                parameter *= 0.5
        model.save_pretrained(directory / "target")
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(directory / "draft")
    torch.manual_seed(1)
    save_draft(directory / "eagle", eagle_config(SIZE, VOCAB), eagle_tensors(SIZE))
    layer = eagle3_tensors(SIZE, VOCAB, VOCAB // 2, num_tapped=2)
    layer["lm_head.weight"][layer["d2t"] + torch.arange(VOCAB // 2) < NUM_SHARP_TOKENS] *= 3
    eagle3 = eagle3_config(SIZE, VOCAB, VOCAB // 2, eagle_aux_hidden_state_layer_ids=[1, 0])
    save_draft(directory / "eagle3", eagle3, layer)
    tapped = load_model(directory / "target", torch.float32, torch.device("cpu"), tapped_layers=(1, 0))
    return Models(load(directory / "target", "cpu"), tapped, load(directory / "draft", "cpu"), directory)


def make_parts(models: Models, cell: EngineCell, answers: Answers, num_scarce_blocks: int = NUM_SCARCE_BLOCKS) -> Parts:
    """Make the engine of a cell, with a proposer of its own; those with a script know the `answers`.

    Where blocks are scarce, there are `num_scarce_blocks`, and as few for a draft model.
    """
    num_blocks = num_scarce_blocks if cell.blocks == "scarce" else NUM_BLOCKS
    constraints = SharedConstraints()
    runner = _runner(models.tapped if cell.proposer == "eagle3" else models.target, cell, NUM_BLOCKS, constraints)
    if cell.proposer == PLAIN:
        return Parts(Scheduler(_scheduler_config(cell, num_blocks), constraints=constraints), runner, None)
    proposer = _proposer(models, cell, runner, answers, num_blocks)
    runner.verify_drafts_of(proposer)
    policy = FixedDepth(DEPTH) if cell.depth == "fixed" else SteadyDepth(DEPTH)
    return Parts(Scheduler(_scheduler_config(cell, num_blocks), Speculation(policy), constraints), runner, proposer)


class SteadyDepth(AdaptiveDepth):
    """The policy with a clock by which every step takes a millisecond, and which has measured that before.

    It drafts as much as drafts are right, from the first step on, however busy the machine is.
    """

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        for size in range(max(MAX_NUM_SEQS.values()).bit_length()):
            for depth, num_steps in ((0, FIRST_PLAIN_STEPS), (max_depth, MEASURED_STEPS)):
                for _ in range(num_steps):
                    self.time(2**size, depth * 2**size, 1.0)

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        super().time(num_sequences, num_drafted, 1e-3)


def prediction_of(cell: EngineCell, answer: list[int], seed: int) -> tuple[int, ...]:
    """Return what a client may say about the answer beforehand: most of it is right."""
    if cell.proposer != "ngram":
        return ()
    generator = random.Random(seed)
    return tuple(token if generator.random() < 0.8 else generator.randrange(VOCAB) for token in answer)


def _scheduler_config(cell: EngineCell, num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=MAX_NUM_SEQS[cell.budget],
        max_num_batched_tokens=TOKEN_BUDGETS[cell.budget],
        max_model_len=MAX_LEN,
        headroom_tokens=0 if cell.blocks == "scarce" else 128,
    )


def _runner(model: CausalLM, cell: EngineCell, num_blocks: int, constraints: SharedConstraints | None = None) -> Runner:
    max_num_seqs = MAX_NUM_SEQS[cell.budget]
    dtype = KV_CACHE_DTYPES.get(cell.kv_cache, model.dtype)
    if cell.runner == "host":
        cache = poisoned_cache(model, num_blocks, dtype)
        budget = TOKEN_BUDGETS[cell.budget]
        return TorchModelRunner(model, cache, max_num_seqs, MAX_LEN, budget, constraints=constraints)
    return make_device_runner(
        model,
        is_graphed=cell.runner == "graphed",
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_draft_tokens=DEPTH,
        kv_cache_dtype=dtype,
        constraints=constraints,
    )


def _proposer(models: Models, cell: EngineCell, runner: Runner, answers: Answers, num_blocks: int) -> Proposer:
    if cell.proposer in SCRIPTED:
        return SCRIPTED[cell.proposer](dict(answers), 0.8)
    if cell.proposer == "draft":
        draft_runner = _runner(models.draft, cell, num_blocks)
        return DraftModelProposer(
            draft_runner, vocab_size=VOCAB, max_model_len=MAX_LEN, max_num_batched_tokens=TOKEN_BUDGETS[cell.budget]
        )
    kind = "eagle" if cell.proposer == "eagle3" else cell.proposer
    directory = models.directory / cell.proposer if kind == "eagle" else None
    settings = RunnerConfig(
        models.directory / "target",
        block_size=BLOCK,
        max_num_seqs=MAX_NUM_SEQS[cell.budget],
        max_num_batched_tokens=TOKEN_BUDGETS[cell.budget],
    )
    return build_proposer(WorkerConfig(speculative=kind, draft_model=directory), settings, runner)
