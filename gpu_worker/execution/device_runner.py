"""Executes step plans on a device that runs behind: submits a step while the one before it is still being computed.

Owns the KV cache's contents and, by row of the batch, everything that the device keeps for a sequence: block table,
last token, sampling parameters. A step crosses to the device in one copy, its launches wait for nothing, and its
results come back on their own. Runs on any device that torch has; where there are no streams, each call computes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.step import ScheduledSequence, StepPlan
from gpu_worker.execution.batch_rows import BatchRows
from gpu_worker.execution.decode_graphs import DecodeGraphs
from gpu_worker.execution.device_sampler import DeviceSampler
from gpu_worker.execution.device_step import DeviceStep, StepOutputs
from gpu_worker.execution.kv_cache import KVCache
from gpu_worker.execution.prompt_logprobs import prompt_chunks, score_chunk
from gpu_worker.execution.row_parameters import RowParameters
from gpu_worker.execution.step_layout import Int64s, StepLayout, lay_out
from gpu_worker.execution.step_tensors import StagedStep, StepTensors
from gpu_worker.execution.transfers import Downloads, Upload
from gpu_worker.execution.warm_up import StepLimits, warm_up_plans
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM

logger = logging.getLogger(__name__)


class DeviceModelRunner:
    """Runs one model on one device. Not thread safe: one thread submits steps.

    Attributes:
        max_model_len: Tokens of a sequence at most.
    """

    max_steps_in_flight = 2

    def __init__(
        self, model: CausalLM, cache: KVCache, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        """Run `model` with the blocks of `cache`."""
        self._model = model
        self._cache = cache
        self._device = model.device
        self._max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        vocab_size = model.config.vocab_size
        self._rows = BatchRows(max_num_seqs, -(-max_model_len // cache.block_size), self._device)
        self._parameters = RowParameters(self._rows.num_rows, vocab_size, self._device)
        self._sampler = DeviceSampler(self._parameters, vocab_size)
        self._last_tokens = torch.zeros(self._rows.num_rows, dtype=torch.int64, device=self._device)
        self._downloads = Downloads(self._device)
        self._graphs: DecodeGraphs | None = None

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self._model.config

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

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> DeviceStep:
        """Launch a step; the plan schedules at least one sequence."""
        with self._on_device():
            scheduled = plan.scheduled
            self._rows.release(plan.departed)
            upload = Upload(self._device)
            rows, newcomers = self._rows.place(scheduled, upload)
            self._parameters.assign(newcomers, upload)
            layout = lay_out(scheduled, rows, self._rows.tables, self._cache.block_size)
            samples = [item.samples for item in scheduled]
            if self._graphs is not None and layout.max_query_len == 1 and all(samples):
                outputs = self._replay(self._graphs, scheduled, layout, samples, upload)
            else:
                outputs = self._launch(scheduled, layout, samples, upload)
            return DeviceStep(plan.step, outputs, self._downloads)

    def warm_up(self) -> None:
        """Execute all kinds of steps, the largest included, so that no request waits for what happens only once.

        Call it before the first step: it writes into the cache.
        """
        started = time.monotonic()
        limits = StepLimits(self._rows.spare, self.max_model_len, self._max_num_batched_tokens, self._cache.block_size)
        for plan in warm_up_plans(limits):
            if plan.scheduled:
                self.submit(plan).result()
            else:
                self._rows.release(plan.departed)
        logger.info("warmed up in %.1f s", time.monotonic() - started)

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture decode steps; from then on they are replayed.

        Call it before the first step, and after `warm_up()`.

        Args:
            progress: Called with the number of batch sizes captured and in all.
        """
        graphs = DecodeGraphs(self._decode, self._rows.spare, self._rows.spare, self._device)
        with self._on_device():
            graphs.capture(progress)
        self._graphs = graphs

    def _replay(
        self,
        graphs: DecodeGraphs,
        scheduled: Values[ScheduledSequence],
        layout: StepLayout,
        samples: list[bool],
        upload: Upload,
    ) -> StepOutputs:
        """Decode one token of each sequence, and sample the next."""
        request = self._sampler.stage(layout.rows, upload)
        upload.send()
        logits, rows = graphs.run(layout, _output_positions(scheduled))
        token_ids, logprobs = self._sampler.sample(logits, rows, request)
        self._last_tokens.index_copy_(0, rows, token_ids)
        return StepOutputs(samples, token_ids, request.logprob_places, request.num_top, logprobs, [])

    def _launch(
        self, scheduled: Values[ScheduledSequence], layout: StepLayout, samples: list[bool], upload: Upload
    ) -> StepOutputs:
        """Compute whatever mixture of chunks and decodes."""
        step = StagedStep(layout, _output_positions(scheduled), upload)
        sampled_rows = layout.rows[samples]
        rows, last_tokens = upload.add(sampled_rows), upload.add(layout.last_tokens[samples])
        request = self._sampler.stage(sampled_rows, upload)
        chunks = prompt_chunks(scheduled, layout.query_starts)
        targets = [upload.add(np.array(chunk.targets, dtype=np.int64)) for chunk in chunks]
        upload.send()
        hidden = self._forward(step.tensors)
        scores = [
            (chunk, score_chunk(self._model, hidden, chunk, staged.tensor))
            for chunk, staged in zip(chunks, targets, strict=True)
        ]
        if not len(sampled_rows):
            return StepOutputs(samples, rows.tensor, (), (), None, scores)
        logits = self._model.logits(hidden.index_select(0, last_tokens.tensor))
        token_ids, logprobs = self._sampler.sample(logits, rows.tensor, request)
        self._last_tokens.index_copy_(0, rows.tensor, token_ids)
        return StepOutputs(samples, token_ids, request.logprob_places, request.num_top, logprobs, scores)

    def _decode(self, step: StepTensors) -> torch.Tensor:
        return self._model.logits(self._forward(step))

    def _forward(self, step: StepTensors) -> torch.Tensor:
        """Gather the model's input from the step and the rows, and run the model up to the hidden vectors."""
        self._parameters.values.position.index_copy_(0, step.rows, step.output_positions)
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
        )
        return self._model.forward(token_ids, step.positions, context)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the device the current one of this thread: Triton launches there."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()


def _output_positions(scheduled: Values[ScheduledSequence]) -> Int64s:
    """Return which token of its output each sequence would sample."""
    positions = [item.start + item.num_tokens - item.sequence.num_prompt_tokens for item in scheduled]
    return np.array(positions, dtype=np.int64)
