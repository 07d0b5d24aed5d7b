"""Executes step plans with torch: assembles the inputs, runs the model, samples.

Owns the KV cache's contents and the batch state kept between steps. It only reads sequences. With a proposer it
computes drafts behind the decodes that may verify some, and samples behind each of these too.
"""

from __future__ import annotations

import logging
import time

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import CompletedStep, SampledTokens, ScheduledSequence, StepPlan, StepResult
from gpu_worker.execution.drafts.drafting import Drafting
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.drafts.verification import ComputedStep, move_accepted
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.execution.sampling.prompt_logprobs import chunk_entries, prompt_chunks, score_chunk
from gpu_worker.execution.sampling.sampler import Sampler
from gpu_worker.execution.step_inputs import StepAssembler, StepInputs
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from shared.messages import Sampling

logger = logging.getLogger(__name__)

_NOTHING_SAMPLED = SampledTokens()


class TorchModelRunner:
    """Runs one model on one device. Not thread safe: one thread executes steps.

    Attributes:
        max_model_len: Tokens of a sequence at most.
    """

    max_steps_in_flight = 1

    def __init__(self, model: CausalLM, cache: KVCache, max_num_seqs: int, max_model_len: int) -> None:
        """Run `model` with the blocks of `cache`."""
        self._model = model
        self._cache = cache
        self._assembler = StepAssembler(cache, max_num_seqs, max_model_len, model.device)
        self._sampler = Sampler(model.device)
        self._drafting: Drafting | None = None
        self.max_model_len = max_model_len

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self._model.config

    @property
    def model(self) -> CausalLM:
        """The model."""
        return self._model

    @property
    def cache(self) -> KVCache:
        """The blocks; proposers may read them, and write where the tokens of a plan are about to be written."""
        return self._cache

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._model.dtype

    @property
    def num_blocks(self) -> int:
        """KV blocks to schedule with."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._cache.block_size

    def verify_drafts_of(self, proposer: Proposer | None) -> None:
        """Ask `proposer` for what plans allow to be drafted, None nobody. Call it while no sequence is running."""
        if proposer is None:
            self._drafting = None
            return
        config = self._model.config
        windows = [config.attention_shape(layer).sliding_window for layer in range(config.num_layers)]
        window = min((window for window in windows if window is not None), default=None)
        self._drafting = Drafting(proposer, config.vocab_size, window, draws_from_trees=False)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> CompletedStep:
        """Compute the plan's tokens and sample where it says so; the plan schedules at least one sequence."""
        scheduled = plan.scheduled
        drafts = None if self._drafting is None else self._drafting.drafts(scheduled, plan.departed)
        inputs = self._assembler.assemble(scheduled, drafts)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.context)
        sampled = self._sample(hidden, inputs, scheduled, drafts)
        for chunk in prompt_chunks(scheduled, inputs.layout.query_starts):
            targets = torch.tensor(chunk.targets, dtype=torch.int64, device=hidden.device)
            entries = chunk_entries(chunk, score_chunk(self._model, hidden, chunk, targets))
            tokens = sampled[chunk.place]
            sampled[chunk.place] = msgspec.structs.replace(tokens, prompt_logprobs=entries)
        return CompletedStep(StepResult(plan.step, sampled))

    @torch.inference_mode()
    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Run a prompt and a few decodes, so that the first request does not pay for what is set up lazily.

        Call it before the first step: it writes into the cache.
        """
        started = time.monotonic()
        num_tokens = max(1, min(max_num_batched_tokens, self.max_model_len - 1, 256))
        blocks = list(range(-(-(num_tokens + 1) // self._cache.block_size)))
        sequence = Sequence("warm-up", [0] * num_tokens, num_tokens, Sampling(top_p=0.9), 1, block_table=blocks)
        self.submit(StepPlan(0, [ScheduledSequence(sequence, 0, num_tokens, True)], num_tokens))
        sequence.token_ids.append(0)
        self.submit(StepPlan(0, [ScheduledSequence(sequence, num_tokens, 1, True)], 1))
        logger.info("warmed up in %.1f s", time.monotonic() - started)

    def _sample(
        self,
        hidden: torch.Tensor,
        inputs: StepInputs,
        scheduled: list[ScheduledSequence],
        drafts: list[Draft] | None,
    ) -> list[SampledTokens]:
        """Sample where the plan says so, and behind each guess; tell the proposer what the step computed."""
        places = [place for place, item in enumerate(scheduled) if item.samples]
        sampling = [scheduled[place].sequence for place in places]
        accepted: dict[int, tuple[int, ...]] = {}
        if len(places) == len(hidden):
            sampled = self._sampler.sample(self._model.logits(hidden), sampling)
        elif not places:
            sampled = []
        elif drafts is None:
            rows = inputs.layout.last_tokens[places]
            sampled = self._sampler.sample(self._model.logits(_rows(hidden, rows)), sampling)
        else:
            theirs = [drafts[place] for place in places]
            last = zip(inputs.layout.last_tokens[places], theirs, strict=True)
            rows = np.concatenate([np.arange(row - len(draft), row + 1) for row, draft in last])
            sampled, paths = self._sampler.verify(self._model.logits(_rows(hidden, rows)), sampling, theirs)
            accepted = dict(zip(places, paths, strict=True))
            move_accepted(self._cache, inputs.layout, drafts, accepted)
        if len(places) < len(scheduled):
            results = iter(sampled)
            sampled = [next(results) if item.samples else _NOTHING_SAMPLED for item in scheduled]
        if self._drafting is not None and self._drafting.wants_hidden:
            self._drafting.observe(ComputedStep(scheduled, inputs.layout, hidden, sampled, accepted))
        return sampled


def _rows(hidden: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    return hidden[torch.from_numpy(rows).to(hidden.device)]
