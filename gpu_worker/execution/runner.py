"""Executes step plans on a device that runs behind: submits a step while the one before it is still being computed.

Owns the KV cache's contents and, by row of the batch, everything that the device keeps for a sequence: block table,
last token, sampling parameters. A step crosses to the device in one copy, its launches wait for nothing, and its
results come back on their own. With a proposer there is one step at a time, since the next begins where the drafts of
this one end that were right. Runs on any device that torch has; where there are no streams, each call computes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gpu_worker.core.step import SampledTokens, StepPlan
from gpu_worker.execution.batch.assembled_step import AssembledStep
from gpu_worker.execution.batch.graph_shapes import MAX_VERIFIED_ROWS, GraphShape, graph_shapes
from gpu_worker.execution.batch.graphs import ComputedRows, DecodeGraphs
from gpu_worker.execution.batch.layout import lay_out
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.sampled_rows import SampledRows
from gpu_worker.execution.batch.step_tensors import StagedStep, StepTensors
from gpu_worker.execution.batch.transfers import Downloads, StagedArray, Upload
from gpu_worker.execution.drafts.drafting import Drafting
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.drafts.verification import ComputedStep, move_accepted
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.execution.sampling.device_sampler import DeviceSampler, DrawnTokens, SamplingRequest
from gpu_worker.execution.sampling.prompt_logprobs import prompt_chunks, score_chunk
from gpu_worker.execution.sampling.row_parameters import RowParameters
from gpu_worker.execution.step import DeviceStep, StepOutputs
from gpu_worker.execution.warm_up import StepLimits, WarmUpProposer, warm_up_plans
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows that are sampled at once, on their way to the device."""

    request: SamplingRequest
    tokens: StagedArray
    rows: StagedArray


class DeviceModelRunner:
    """Runs one model on one device. Not thread safe: one thread submits steps.

    Attributes:
        max_model_len: Tokens of a sequence at most.
    """

    max_steps_in_flight = 2

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_draft_tokens: int = 0,
    ) -> None:
        """Run `model` with the blocks of `cache`; sequences verify up to `max_draft_tokens` in a step."""
        self._model = model
        self._cache = cache
        self._device = model.device
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_draft_tokens = max_draft_tokens
        self.max_model_len = max_model_len
        vocab_size = model.config.vocab_size
        self._rows = BatchRows(max_num_seqs, -(-max_model_len // cache.block_size), self._device)
        self._parameters = RowParameters(self._rows.num_rows, vocab_size, self._device)
        self._sampler = DeviceSampler(self._parameters, vocab_size)
        self._last_tokens = torch.zeros(self._rows.num_rows, dtype=torch.int64, device=self._device)
        self._downloads = Downloads(self._device)
        self._graphs: DecodeGraphs | None = None
        self._drafting: Drafting | None = None

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

    def verify_drafts_of(self, proposer: Proposer) -> None:
        """Ask `proposer` for what plans allow to be drafted. Call it before the first step, and after `warm_up()`."""
        windows = [window for window in self._model.config.layer_windows if window is not None]
        self._drafting = Drafting(proposer, self._model.config.vocab_size, min(windows, default=None))
        self.max_steps_in_flight = 1

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> DeviceStep:
        """Launch a step; the plan schedules at least one sequence."""
        with self._on_device():
            upload = Upload(self._device)
            step = self._assemble(plan, upload)
            shape = None if self._graphs is None or not step.is_decode else self._graphs.shape_for(step.layout)
            if self._graphs is None or shape is None:
                outputs, hidden = self._launch(step, upload)
            else:
                outputs, hidden = self._replay(self._graphs, shape, step, upload)
            land = None if self._drafting is None else partial(self._land, self._drafting, step, hidden)
            return DeviceStep(plan.step, outputs, self._downloads, land)

    def warm_up(self) -> None:
        """Execute all kinds of steps, the largest included, so that no request waits for what happens only once.

        Call it before the first step: it writes into the cache.
        """
        started = time.monotonic()
        limits = StepLimits(
            self._rows.spare,
            self.max_model_len,
            self._max_num_batched_tokens,
            self._cache.block_size,
            self._max_draft_tokens,
        )
        steps_in_flight = self.max_steps_in_flight
        self.verify_drafts_of(WarmUpProposer())
        for plan in warm_up_plans(limits):
            if plan.scheduled:
                self.submit(plan).result()
            else:
                self._rows.release(plan.departed)
        self._drafting, self.max_steps_in_flight = None, steps_in_flight
        logger.info("warmed up in %.1f s", time.monotonic() - started)

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture decode steps; from then on they are replayed.

        Call it before the first step, and after `warm_up()`.

        Args:
            progress: Called with the number of graphs captured and in all.
        """
        shapes = graph_shapes(self._rows.spare, self._max_draft_tokens)
        graphs = DecodeGraphs(self._decode, shapes, self._rows.spare, self._device)
        with self._on_device():
            graphs.capture(progress)
        self._graphs = graphs

    def _assemble(self, plan: StepPlan, upload: Upload) -> AssembledStep:
        """Bring the rows up to date, ask for drafts, and lay out the step."""
        scheduled, drafting = plan.scheduled, self._drafting
        self._rows.release(plan.departed)
        drafts = None if drafting is None else drafting.drafts(scheduled, plan.departed)
        rows, newcomers = self._rows.place(scheduled, upload)
        self._parameters.assign(newcomers, upload)
        if drafting is not None:
            self._parameters.catch_up([item.sequence for item in scheduled], rows, upload)
        layout = lay_out(scheduled, rows, self._rows.tables, self._cache.block_size, drafts)
        return AssembledStep(scheduled, layout, drafts)

    def _replay(
        self, graphs: DecodeGraphs, shape: GraphShape, step: AssembledStep, upload: Upload
    ) -> tuple[StepOutputs, torch.Tensor]:
        """Decode each sequence, and sample; return also the hidden vectors of the step's tokens."""
        request = self._sampler.stage(step.sampled_rows(), upload)
        upload.send()
        computed, rows = graphs.run(shape, step.layout)
        drawn = self._draw(computed.logits, rows, request)
        is_kept = self._drafting is not None and self._drafting.wants_hidden
        # The next replay writes to the same memory.
        hidden = computed.hidden.clone() if is_kept else computed.hidden
        return StepOutputs(step.samples, [drawn], [], step.sampling_drafts), hidden

    def _launch(self, step: AssembledStep, upload: Upload) -> tuple[StepOutputs, torch.Tensor]:
        """Compute whatever mixture of chunks and decodes; return also the hidden vectors of the step's tokens."""
        staged = StagedStep(step.layout, upload)
        # With drafts there are more rows than sequences; what their logits take must not grow with it.
        most = max(self._rows.spare, MAX_VERIFIED_ROWS)
        tiles = [self._stage(tile, upload) for tile in step.sampled_rows().tiles(most)]
        chunks = prompt_chunks(step.scheduled, step.layout.query_starts)
        targets = [upload.add(np.array(chunk.targets, dtype=np.int64)) for chunk in chunks]
        upload.send()
        hidden = self._forward(staged.tensors)
        scores = [
            (chunk, score_chunk(self._model, hidden, chunk, wanted.tensor))
            for chunk, wanted in zip(chunks, targets, strict=True)
        ]
        drawn = []
        for tile in tiles:
            logits = self._model.logits(hidden.index_select(0, tile.tokens.tensor))
            drawn.append(self._draw(logits, tile.rows.tensor, tile.request))
        return StepOutputs(step.samples, drawn, scores, step.sampling_drafts), hidden

    def _stage(self, sampled: SampledRows, upload: Upload) -> _Tile:
        return _Tile(self._sampler.stage(sampled, upload), upload.add(sampled.tokens), upload.add(sampled.rows))

    def _draw(self, logits: torch.Tensor, rows: torch.Tensor, request: SamplingRequest) -> DrawnTokens:
        """Sample; where nothing is verified the tokens are the last of their sequences."""
        drawn = self._sampler.sample(logits, rows, request)
        if not request.verifies:
            self._last_tokens.index_copy_(0, rows, drawn.token_ids)
        return drawn

    def _land(
        self, drafting: Drafting, step: AssembledStep, hidden: torch.Tensor, sampled: list[SampledTokens]
    ) -> None:
        """Put the KV of right guesses in its place, and show the proposer what the step left behind."""
        accepted = {place: tokens.accepted for place, tokens in enumerate(sampled)}
        with self._on_device(), torch.inference_mode():
            if step.drafts is not None:
                move_accepted(self._cache, step.layout, step.drafts, accepted)
            if drafting.wants_hidden:
                drafting.observe(ComputedStep(step.scheduled, step.layout, hidden, sampled, accepted))

    def _decode(self, step: StepTensors) -> ComputedRows:
        hidden = self._forward(step)
        return ComputedRows(hidden, self._model.logits(hidden))

    def _forward(self, step: StepTensors) -> torch.Tensor:
        """Gather the model's input from the step and the rows, and run the model up to the hidden vectors."""
        sampled_last = self._last_tokens.index_select(0, step.token_rows)
        # A row without a valid last token has failed, which the host does not know yet: any token will do.
        token_ids = torch.where(step.token_ids < 0, sampled_last, step.token_ids).clamp_(min=0)
        context = AttentionContext(
            caches=self._cache.layers,
            slot_mapping=step.slots,
            block_tables=self._rows.device_tables.index_select(0, step.rows),
            query_starts=step.query_starts,
            context_lens=step.context_lens,
            max_query_len=step.max_query_len,
            max_context_len=self.max_model_len,
            tree_masks=step.tree_masks,
        )
        return self._model.forward(token_ids, step.positions, context)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the device the current one of this thread: Triton launches there."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
