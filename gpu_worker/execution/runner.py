"""Executes step plans with torch: assembles the inputs, runs the model, samples.

A step crosses to the device in one copy, its launches wait for nothing, and its results come back on their own. A GPU
runs behind: a step is submitted while the one before it is computed, and all but large ones are graphs. On a CPU there
is one in flight, nothing is copied, and the host knows all tokens. A step that verifies drafts is in flight alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences
from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.draft import MAX_DRAFT_TOKENS, Draft
from gpu_worker.core.model_runner import InvalidLogitsError, PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.scheduler_config import WindowConfig
from gpu_worker.core.step import CompletedStep, SampledTokens, StepResult
from gpu_worker.core.step_interrupt import StepInterrupt
from gpu_worker.execution.batch.assembled_step import AssembledStep, StagedScores, is_asked
from gpu_worker.execution.batch.graph_shapes import CapturedSteps, GraphShape, graph_shapes
from gpu_worker.execution.batch.graphs import ComputedRows, StepGraphs
from gpu_worker.execution.batch.key_turns import KeyTurns
from gpu_worker.execution.batch.own_rows import OwnRows
from gpu_worker.execution.batch.placed_tokens import Frame
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_table import DeviceStep, HostStep, StagedStep, copy_states, lay_out, step_context
from gpu_worker.execution.batch.transfers import Downloads, Upload
from gpu_worker.execution.drafts.drafting import ComputedStep, Drafting, forced_drafts, replay_accepted
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.encoder import EncodedStep, ImageEncoder
from gpu_worker.execution.memory.block_bytes import BlockBytes, cache_bytes, state_bytes
from gpu_worker.execution.memory.kv_cache import KVCache, allocate_states
from gpu_worker.execution.sampling.sampler import Sampler
from gpu_worker.execution.step import StepHead, SubmittedStep
from gpu_worker.execution.warm_up import StepLimits, WarmUpProposer, first_plans, warm_up_plans
from gpu_worker.layers.attention_context import OwnTokens, ScoredTokens, StepSizes
from gpu_worker.layers.media_inputs import MediaInputs
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from kernels.low_rank import AdapterRows

logger = logging.getLogger(__name__)

StepInputs = tuple[MediaInputs | None, AdapterRows | None, ScoredTokens | None, int, OwnTokens | None]
_NO_INPUTS: StepInputs = (None, None, None, 0, None)
ShareDrafts = Callable[[StepPlan, list[Draft] | None], list[Draft] | None]


class TorchModelRunner:
    """Runs one model on one device. Not thread safe: one thread submits steps.

    Attributes:
        cache: The blocks; proposers may read them, and write where the tokens of a plan are about to be written.
        max_steps_in_flight: Steps that may be submitted before the first of them has a result.
        num_state_slots: Slots of recurrent layers to schedule with.
        share_drafts: Called with each plan and the drafts that were made for it, one a share; the step verifies what
            it returns. Of several processes the first one tells the others so.
        interrupt: Gives up the step that is computed; None where that cannot be: on a device that computes by itself,
            by several processes, and where states would be left half changed.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_draft_tokens: int = 0,
        *,
        is_asynchronous: bool | None = None,
        captured: CapturedSteps = CapturedSteps.ALL,
        num_state_slots: int = 0,
        constraints: ConstraintSource | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self._encoder = encoder
        self._captured = captured
        self.model = model
        self.cache = cache
        self._device = model.device
        self.is_asynchronous = model.device.type != "cpu" if is_asynchronous is None else is_asynchronous
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_draft_tokens = max_draft_tokens
        self.max_model_len = max_model_len
        self.max_steps_in_flight = 2 if self.is_asynchronous else 1
        width, num_windows = -(-max_model_len // cache.block_size), len(cache.groups) - 1
        self._sequences = BatchSequences(constraints)
        self._rows = BatchRows(max_num_seqs, width, self._device, num_windows)
        self.num_state_slots = max(num_state_slots, max_num_seqs)
        self._states = allocate_states(cache.layout, self.num_state_slots, max_draft_tokens, self._device)
        self._turns = KeyTurns(model, cache)
        self._frame = Frame(
            self._rows.whole.host,
            cache.block_size,
            has_states=self._states is not None,
            has_axes=encoder is not None and encoder.has_axes,
            kept=cache.tokens,
            windows=tuple(tables.host for tables in self._rows.windows),
            knows_tokens=not self.is_asynchronous,
        )
        self._sampler = Sampler(self._rows.num_rows, model.config.vocab_size, self._device, model.vocabulary)
        self._head = StepHead(model, self._sampler, self._rows, keeps_last_tokens=self.is_asynchronous)
        self._downloads = Downloads(self._device)
        self._graphs: StepGraphs | None = None
        self._drafting: Drafting | None = None
        self.share_drafts: ShareDrafts | None = None
        self.interrupt: StepInterrupt | None = None
        interrupt = StepInterrupt()
        if model.device.type == "cpu" and self._states is None and model.interrupt_by(interrupt):
            self.interrupt = interrupt
        # Submitted with a proposer that wants to see it, and its result not asked for yet.
        self._unlanded: deque[AssembledStep] = deque(maxlen=self.max_steps_in_flight)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.model.dtype

    @property
    def num_blocks(self) -> int:
        """KV blocks to schedule with."""
        return self.cache.num_blocks * self.num_parts

    @property
    def num_parts(self) -> int:
        """Equal parts of these, of which this runner has one."""
        return self.cache.num_parts

    @property
    def windows(self) -> tuple[WindowConfig, ...]:
        """Blocks of the layers that keep the last tokens, to schedule with."""
        return self.cache.windows

    @property
    def block_contents(self) -> list[BlockBytes]:
        """The contents of the blocks of each group, then those of the slots of states."""
        states = [] if self._states is None else [state_bytes(self._states, self._device)]
        return [*cache_bytes(self.cache), *states]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cache.block_size

    @property
    def step_limits(self) -> StepLimits:
        """What bounds a step."""
        return StepLimits(
            self._rows.spare,
            self.max_model_len,
            self._max_num_batched_tokens,
            self.cache.block_size,
            self._max_draft_tokens,
            tuple(group.num_blocks for group in self.cache.groups[1:]),
            None if self._states is None else self.num_state_slots,
            None if self.model.expanding is None else self.model.expanding.expands,
            self.cache.part,
        )

    def verify_drafts_of(self, proposer: Proposer | None) -> None:
        """Ask `proposer` for the drafts that plans allow; None turns drafting off.

        Call it while no sequence is in the batch.
        """
        self._unlanded.clear()
        if proposer is None:
            self._drafting = None
            return
        self._drafting = Drafting(proposer, self.model.config.vocab_size)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Launch a step that is not empty; `StepGivenUpError` if `interrupt` asked for it."""
        if self.interrupt is not None:
            self.interrupt.begin(plan.step)
        with torch.inference_mode():
            if self._device.type != "cuda":
                return self._submit(plan)
            # Triton launches on the current device of the thread.
            with torch.cuda.device(self._device):
                return self._submit(plan)

    def clear(self) -> None:
        """Forget all sequences.

        Call it when an engine ends before its runner does: no plan says that its last sequences have left.
        """
        self._depart(self._sequences.clear())
        if self._encoder is not None:
            self._encoder.clear()

    def restart(self) -> None:
        """Forget all sequences, and warm up, which may fail, and capture graphs again: others may have begun anew."""
        self.clear()
        self._unlanded.clear()
        self._graphs = None
        share_drafts, self.share_drafts = self.share_drafts, None
        try:
            self.warm_up()
            if self._device.type == "cuda":
                self.capture_graphs()
        finally:
            self.share_drafts = share_drafts

    def warm_up(self) -> None:
        """Execute steps that make everything happen which happens only once, so that no request waits for it.

        On a device whose kernels are compiled for a shape these are all kinds of steps, the largest included. Call it
        before the first step: it writes into the cache.

        Raises:
            InvalidLogitsError: The model's logits are not a distribution: its weights or their data type are broken.
        """
        started, drafting = time.monotonic(), self._drafting
        limits = self.step_limits
        self.verify_drafts_of(WarmUpProposer())
        for plan in warm_up_plans(limits) if self.is_asynchronous else first_plans(limits):
            if any(tokens.error is not None for tokens in self.submit(plan).result().sampled):
                raise InvalidLogitsError
        self.clear()
        self._drafting = drafting
        logger.info("warmed up in %.1f s", time.monotonic() - started)

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture steps, which are replayed from then on; call it before the first step, and after `warm_up()`."""
        limits = (self._rows.spare, self._max_num_batched_tokens, self._max_draft_tokens)
        shapes = graph_shapes(
            self._captured,
            *limits,
            has_many_launches=self.model.config.has_many_launches,
            expanded_block_size=None if self.model.expanding is None else self.cache.block_size,
        )
        if not shapes:
            return
        started = time.monotonic()
        slot = None if self._states is None else self.num_state_slots
        graphs = StepGraphs(self._compute, shapes, self._rows.spare, self._device, len(self._rows.windows), slot)
        with self._on_device():
            graphs.capture(progress)
        self._graphs = graphs
        logger.info("captured %d graphs in %.1f s", len(shapes), time.monotonic() - started)

    def _submit(self, plan: StepPlan) -> PendingStep:
        if self._encoder is not None:
            # Before others get the plan: what fails here fails here alone.
            self._encoder.encode(plan)
            if not plan.rows:
                return EncodedStep(plan.step, self._device)
        upload = Upload(self._device)
        step = self._assemble(plan, upload)
        graphs = self._graphs
        media = None if self._encoder is None else self._encoder.inputs(plan, step.sequences, step.layout)
        own = OwnRows.of(step.layout, self._rows, self.cache, upload)
        attending = step.layout if own is None else own.layout
        shape, (num_expanded_blocks, outweighs_launches) = None, self._expansion(attending)
        is_plain = media is None and step.adapters is None and step.scores is None
        if graphs is not None and is_plain:
            shape = graphs.shape_for(step.layout, is_decode=step.is_decode, num_expanded_blocks=num_expanded_blocks)
            if shape is None and num_expanded_blocks and not outweighs_launches:
                shape = graphs.shape_for(step.layout, is_decode=step.is_decode)
        staged = StagedStep(step.layout, upload) if shape is None else None
        head = self._head.stage(step, upload)
        upload.send()
        if not self.model.has_head:
            head.share_masks()
        scored = None if step.scores is None else step.scores.tokens()
        owned = None if own is None else own.tokens(self._rows, self.cache, num_expanded_blocks)
        inputs = (media, step.adapters, scored, num_expanded_blocks, owned)
        computed = self._replay(step, shape) if staged is None else self._launch(step, staged, inputs)
        if self.interrupt is not None:
            self.interrupt.check()
        if not self.model.has_head:
            # Who has it answers for all.
            return CompletedStep(StepResult(plan.step, []))
        outputs = self._head.outputs(step, head, computed)
        outputs.attention = [] if scored is None else [group.attention for group in scored.groups]
        land, drafting = None, self._drafting
        is_observed = drafting is not None and drafting.wants_hidden
        if is_observed:
            self._unlanded.append(step)
        if is_observed or step.drafts is not None:
            land = partial(self._land, drafting, step, computed.hidden)
        return SubmittedStep(step, outputs, self._downloads, land)

    def _expansion(self, layout: HostStep | None) -> tuple[int, bool]:
        """Return of how many blocks a step makes keys and values, and whether that repays to launch it without a graph.

        A graph with room for a long context would make the keys and values of the longest one.
        """
        latent = self.model.expanding
        if layout is None or layout.max_query_len == 1 or latent is None:
            return 0, False
        query_lens = np.diff(layout.query_starts)
        sizes = StepSizes.of(query_lens, layout.context_lens, self.cache.block_size, self.max_model_len)
        if not latent.expands(sizes):
            return 0, False
        return sizes.num_blocks, latent.outweighs_launches(sizes)

    def _assemble(self, plan: StepPlan, upload: Upload) -> AssembledStep:
        changes, rows = self._sequences.apply(plan), self._rows
        if changes.departed:
            self._depart(changes.departed)
        rows.follow(plan, upload)
        if plan.evictions:
            self._turns.apply(plan.evictions, upload)
        if changes.new:
            self._sampler.assign(changes.new, upload)
        sequences = self._sequences.of(plan.rows)
        wants_shares = self._drafting is not None and self._drafting.wants_hidden
        wants_shares = wants_shares or bool(plan.num_drafts) or plan.num_decodes < len(plan.rows)
        shares = self._sequences.shares(plan) if wants_shares else []
        most = MAX_DRAFT_TOKENS if self._states is None else self._states.max_draft_tokens
        drafts = forced_drafts(shares, most) if plan.forced else None
        if self._drafting is not None:
            drafts = self._drafting.drafts(shares if plan.num_drafts else [], drafts)
        elif drafts is not None and not any(drafts):
            drafts = None
        if self.share_drafts is not None:
            drafts = self.share_drafts(plan, drafts)
        layout = lay_out(plan, sequences, self._frame, drafts, rows.evicted if rows.has_evicted else None)
        if self._states is not None:
            copy_states(self._states, sequences, plan.states, upload)
        step = AssembledStep(plan, shares, layout, rows.prompt_lens[layout.rows], drafts, sequences)
        if rows.has_adapters and self.model.adapters is not None:
            step.adapters = rows.adapted(layout.token_rows, self.model.adapters)
        if rows.has_scored and is_asked(layout, scored_from := rows.scored_from[layout.rows]):
            step.scores = StagedScores(layout, scored_from, self.cache.block_size, upload)
        return step

    def _depart(self, departed: list[BatchSequence]) -> None:
        """Forget the state of sequences that have left the batch."""
        for unlanded in self._unlanded:
            unlanded.departed.update(departed)
        if self._drafting is not None and departed:
            self._drafting.forget(departed)

    def _launch(self, step: AssembledStep, staged: StagedStep, inputs: StepInputs) -> ComputedRows:
        """Launch one kernel after the other, up to the hidden vectors."""
        longest, knows_tokens = step.layout.max_context_len, self._frame.knows_tokens
        return ComputedRows(self._forward(staged.tensors, longest, inputs, knows_tokens=knows_tokens), None)

    def _replay(self, step: AssembledStep, shape: GraphShape | None) -> ComputedRows:
        """Launch the graph of a shape, which may go on to the logits."""
        assert self._graphs is not None, "graphs have shapes"
        assert shape is not None, "the step fits none"
        computed = self._graphs.run(shape, step.layout)
        if self._drafting is not None and self._drafting.wants_hidden:
            # The next replay writes to the same memory, and the proposer may see it later.
            return ComputedRows(computed.hidden.clone(), computed.logits)
        return computed

    def _land(
        self, drafting: Drafting | None, step: AssembledStep, hidden: torch.Tensor, sampled: list[SampledTokens]
    ) -> None:
        """Take states through accepted draft tokens, and let the proposer know what the step left behind."""
        if step in self._unlanded:
            self._unlanded.remove(step)
        if step.drafts is not None and self._states is not None:
            accepted = {place: tokens.num_accepted for place, tokens in enumerate(sampled)}
            with self._on_device(), torch.inference_mode():
                replay_accepted(self.model, self._states, step.layout, accepted)
        if drafting is not None and drafting.wants_hidden:
            drafting.observe(ComputedStep(step.shares, step.layout, hidden, sampled, step.departed))

    def _compute(self, step: DeviceStep, shape: GraphShape) -> ComputedRows:
        inputs = (None, None, None, shape.num_expanded_blocks, None)
        hidden = self._forward(step, self.max_model_len, inputs, knows_tokens=False)
        return ComputedRows(hidden, self.model.logits(hidden) if shape.has_logits and self.model.has_head else None)

    def _forward(
        self, step: DeviceStep, max_context_len: int, inputs: StepInputs = _NO_INPUTS, *, knows_tokens: bool
    ) -> torch.Tensor:
        token_ids = step.token_ids
        if not knows_tokens:
            sampled_last = self._head.last_tokens.index_select(0, step.token_rows)
            # A row without a valid last token has failed, which the host does not know yet: any token will do.
            token_ids = torch.where(token_ids < 0, sampled_last, token_ids).clamp_(min=0)
        context = step_context(step, self._rows, self.cache, self._states, max_context_len, *inputs)
        return self.model.forward(token_ids, step.positions, context)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
