"""The engine on a model that is in memory already: real scheduler, real runner, random prompts, the host's clock.

And a step's tensors without an engine, and drafts of a scripted quality.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Values
from itertools import accumulate

import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest, Proposer
from gpu_worker.execution.memory.kv_cache import KVCache, allocate_kv_cache, allocate_states
from gpu_worker.execution.memory.state_sizes import num_sure_slots
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.layers.attention_context import AttentionContext, StepSizes
from gpu_worker.models.decoder import CausalLM
from kernels.paged_attention import ExpandedBlocks
from kernels.sampling import SamplingParameters, sample_tokens
from kernels.state_rows import StateRows
from ops.bench.spec.fixed_depth import FixedDepth
from ops.bench.stepping import BLOCK_SIZE, SteppedEngine, engine_of, states_of

# Steps that are timed together: with steps in flight, single ones begin and end at odd times.
_STEPS_PER_SAMPLE = 8


class StepEngine(SteppedEngine):
    """An engine whose cache and runner are made for a load, and whose steps are sampled several at once."""

    def __init__(
        self,
        model: CausalLM,
        max_num_seqs: int,
        max_model_len: int,
        *,
        token_budget: int = 8192,
        has_graphs: bool = True,
        is_warm: bool = False,
        has_prefix_cache: bool = False,
        proposer: Proposer | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Give each sequence blocks for `max_model_len` tokens.

        With `has_graphs`, decodes are captured in graphs first. With `is_warm`, all kernels that any step may need are
        compiled first, which takes a while. With a proposer, each sequence verifies `num_drafts` drafts in a step.
        """
        num_blocks = max_num_seqs * (-(-max_model_len // BLOCK_SIZE) + 1)
        self.cache = allocate_kv_cache(num_blocks, BLOCK_SIZE, model.config, model.dtype, model.device)
        # Steps timed on their own read blocks that were never written, and write the results back.
        for tensor in (tensor for stack in self.cache.groups[0].stacks for tensor in (stack.keys, stack.values)):
            tensor.zero_()
        budget = max(token_budget, max_num_seqs)
        runner = TorchModelRunner(
            model,
            self.cache,
            max_num_seqs,
            max_model_len,
            budget,
            num_drafts,
            num_state_slots=num_sure_slots(max_num_seqs, has_blocks=True) if model.config.has_states else 0,
        )
        if is_warm:
            runner.warm_up()
        if has_graphs:
            runner.capture_graphs()
        if proposer is not None:
            runner.verify_drafts_of(proposer)
        made = engine_of(
            runner,
            max_num_seqs=max_num_seqs,
            token_budget=budget,
            speculation=None if proposer is None else Speculation(FixedDepth(num_drafts)),
            enable_prefix_caching=has_prefix_cache,
            state=states_of(runner),
        )
        super().__init__(made.engine, runner)

    def fill(self, num_seqs: int, prompt_len: int) -> list[Sequence]:
        """Add sequences that go on to the end of the context, and step until all of them decode."""
        sequences = [self.add(self.random_prompt(prompt_len), 1 << 30) for _ in range(num_seqs)]
        self.prefill(sequences)
        return sequences

    def time_steps(self, num_steps: int) -> list[float]:
        """Return the seconds of a step, again and again, while the same sequences decode.

        Raises:
            RuntimeError: A sequence ended meanwhile.
        """
        num_running = self.engine.stats.running
        self.step_seconds(_STEPS_PER_SAMPLE)
        samples = [
            sum(self.step_seconds(_STEPS_PER_SAMPLE)) / _STEPS_PER_SAMPLE
            for _ in range(max(1, num_steps // _STEPS_PER_SAMPLE))
        ]
        if self.engine.stats.running != num_running:
            raise RuntimeError(f"{num_running} sequences were to decode, {self.engine.stats.running} are left")
        return samples


class PagedBatch:
    """Gives each of `num_seqs` sequences room for `max_len` tokens, in blocks drawn at random from the whole cache.

    Owns the sequences' states, in models with recurrent layers.
    """

    def __init__(self, model: CausalLM, cache: KVCache, num_seqs: int, max_len: int) -> None:
        """Draw the blocks."""
        width = -(-max_len // cache.block_size)
        if num_seqs * width > cache.num_blocks:
            needed = num_seqs * width
            raise ValueError(
                f"{num_seqs} sequences of {max_len} tokens need {needed} blocks; there are {cache.num_blocks}"
            )
        self._model, self._cache = model, cache
        device = cache.layers[0].keys.device
        order = torch.randperm(cache.num_blocks, device=device)[: num_seqs * width]
        self._tables = order.view(num_seqs, width).int()
        self._states = allocate_states(cache.layout, num_seqs, 0, device)

    def step(self, lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, AttentionContext]:
        """Return positions and context of a step: `lengths` has tokens to compute, and those cached after it."""
        device, block_size = self._tables.device, self._cache.block_size
        queries, contexts = [query for query, _ in lengths], [context for _, context in lengths]
        positions = torch.cat([torch.arange(context - query, context, device=device) for query, context in lengths])
        rows = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(queries, device=device))
        query_starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        slots = torch.arange(len(lengths), device=device)
        sizes = StepSizes.of(queries, contexts, block_size, self._tables.shape[1] * block_size)
        tables, expanded = self._tables[: len(lengths)], None
        if self._model.expanding is not None and self._model.expanding.expands(sizes):
            expanded = ExpandedBlocks.of(tables, context_lens, block_size, sizes.num_blocks)
        context = AttentionContext(
            caches=self._cache.layers,
            slot_mapping=self._tables[rows, positions // block_size].long() * block_size + positions % block_size,
            block_tables=tables,
            query_starts=query_starts,
            context_lens=context_lens,
            max_query_len=max(queries),
            max_context_len=max(contexts),
            expanded=expanded,
            states=() if self._states is None else self._states.layers,
            state_rows=StateRows(slots, query_starts, context_lens, max(queries)) if self._states else None,
        )
        return positions, context


class StaticStep:
    """One step of a model, again and again on the same tensors, so that it can be captured in a graph."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        lengths: list[tuple[int, int]],
        max_len: int,
        *,
        samples_all: bool = False,
    ) -> None:
        """Make the inputs."""
        device = model.device
        self._model = model
        batch = PagedBatch(model, cache, len(lengths), max_len)
        self._positions, self._context = batch.step(lengths)
        self._token_ids = torch.randint(model.config.vocab_size, self._positions.shape, device=device)
        last_rows = self._context.query_starts[1:].long() - 1
        self._sampled_rows = torch.arange(len(self._token_ids), device=device) if samples_all else last_rows
        self._slots = torch.arange(len(self._sampled_rows), device=device)
        zeros = torch.zeros(len(self._sampled_rows), device=device)
        # A temperature of zero, and nothing truncated.
        self._greedy = SamplingParameters(zeros, zeros - torch.inf, zeros.int(), zeros + 1, zeros.long())

    @torch.inference_mode()
    def __call__(self, _: int) -> torch.Tensor:
        """Compute the step up to its tokens, which stay on the device."""
        hidden = self._model.forward(self._token_ids, self._positions, self._context)
        if len(hidden) != len(self._sampled_rows):
            hidden = hidden[self._sampled_rows]
        return sample_tokens(self._model.logits(hidden), self._slots, self._slots, self._greedy, may_truncate=False)


class ScriptedDraft(Draft, frozen=True, gc=False):
    """A chain whose first `num_scripted` tokens count as accepted; the answer has the tokens that were sampled."""

    num_scripted: int = 0

    def num_accepted(self, sampled: Values[int]) -> int:
        """Return what the script says."""
        return self.num_scripted


class ScriptedProposer:
    """Has each token that follows accepted ones accepted with a set probability."""

    wants_hidden = False

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return as many tokens as are asked for."""
        return [self._draft(request.num_tokens) for request in requests]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: BatchSequence) -> None:
        """Ignore it."""

    def _draft(self, count: int) -> Draft:
        num_accepted = 0
        while num_accepted < count and self._random.random() < self._acceptance:
            num_accepted += 1
        token_ids = tuple(self._random.randrange(self._vocab_size) for _ in range(count))
        return ScriptedDraft(token_ids, num_scripted=num_accepted)
