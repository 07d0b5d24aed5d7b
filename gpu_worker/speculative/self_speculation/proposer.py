"""Drafts by the model's own first layers, followed by its own final normalisation and head.

What these layers write into the KV cache is what the whole model writes there when it verifies, so they work on the
sequences' own blocks: no memory, no weights, and no prompt to catch up with.

Source: the drafts of Elhoushi et al., "LayerSkip" (arXiv 2404.16710), section 3.3; a model that was not trained to exit
early drafts worse.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import Protocol

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.speculative.plain_sampling import plain_sampling


class EarlyExitRunner(Protocol):
    """Executes plans on the first layers, with the model's KV cache."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Compute the plan's tokens and sample where it says so."""
        ...


class _Double:
    """A sequence with draft tokens behind its own, in the sequence's own blocks."""

    __slots__ = ("_num_known", "sequence")

    def __init__(self, original: BatchSequence) -> None:
        self.sequence = Sequence(original.id, [], original.num_prompt_tokens, plain_sampling(original.sampling), 0)
        self._num_known = 0

    def follow(self, original: BatchSequence) -> Sequence:
        """Take over the sequence's tokens in place of draft tokens, and its blocks."""
        known, sequence = self._num_known, self.sequence
        PlanWriter.rewind(sequence, known)
        sequence.token_ids[known:] = original.token_ids[known:]
        self._num_known = len(original.token_ids)
        if sequence.block_table is not original.block_table:
            sequence.block_table, sequence.num_told_blocks = original.block_table, 0
        sequence.window_tables = tuple(WindowTable(blocks, 0, 0, 0) for blocks in original.window_tables)
        return sequence


class SelfSpeculationProposer:
    """Keeps a double of each sequence of the batch."""

    wants_hidden = False

    def __init__(self, runner: EarlyExitRunner) -> None:
        """Draft with `runner`."""
        self._runner = runner
        self._doubles: dict[BatchSequence, _Double] = {}
        self._writer = PlanWriter()
        self._departed: list[Sequence] = []

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return what the first layers would go on with, drawn as the requests' tokens are."""
        doubles = [self._double(request.sequence) for request in requests]
        for depth in range(max(request.num_tokens for request in requests)):
            places = [place for place, request in enumerate(requests) if request.num_tokens > depth]
            scheduled = [
                ScheduledSequence(double, len(double.token_ids) - 1, 1, True)
                for double in (doubles[place] for place in places)
            ]
            plan = self._writer.write_any(scheduled, self._departed)
            self._departed = []
            result = self._runner.submit(plan).result()
            for place, tokens in zip(places, result.sampled, strict=True):
                doubles[place].token_ids += tokens.token_ids
        return [
            Draft(tuple(double.token_ids[len(request.sequence.token_ids) :]))
            for double, request in zip(doubles, requests, strict=True)
        ]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: BatchSequence) -> None:
        """Drop a sequence's double."""
        double = self._doubles.pop(sequence, None)
        if double is not None:
            self._departed.append(double.sequence)

    def _double(self, original: BatchSequence) -> Sequence:
        double = self._doubles.get(original)
        if double is None:
            double = self._doubles[original] = _Double(original)
        return double.follow(original)
