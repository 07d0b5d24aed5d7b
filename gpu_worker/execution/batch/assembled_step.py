"""A step as the host knows it before its launch: where it samples, and which tokens are asked how they attend."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from itertools import compress, groupby

import numpy as np
import torch
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.draft import Draft
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from gpu_worker.layers.attention_context import ScoredGroup, ScoredTokens
from kernels.low_rank import AdapterRows


class StagedScores:
    """A step's scored tokens, on their way to the device."""

    def __init__(self, layout: HostStep, scored_from: Int64s, block_size: int, upload: Upload) -> None:
        """Find the tokens from place `scored_from` on in the cache, one number for each sequence of the step.

        The step has such a token.
        """
        ends = layout.context_lens.astype(np.int64)
        counts = np.minimum(np.diff(layout.query_starts), ends - scored_from).clip(0)
        places = np.flatnonzero(counts)
        # Sequences with as many tokens each, one after the other: those that decode come first.
        self.groups = [list(group) for _, group in groupby(places.tolist(), lambda place: int(counts[place]))]
        self._staged: list[tuple[StagedArray, StagedArray, int]] = []
        tokens: list[Int64s] = []
        for group in self.groups:
            offsets = np.arange(1 - counts[group[0]], 1)
            tokens.append((layout.query_starts[1:][group].astype(np.int64) - 1)[:, None] + offsets)
            num_blocks = -(-int(ends[group].max()) // block_size)
            sequences = upload.add(np.array(group, dtype=np.int64))
            self._staged.append((sequences, upload.add(ends[group][:, None] + offsets), num_blocks))
        self._tokens = upload.add(np.concatenate([part.ravel() for part in tokens]))

    def tokens(self) -> ScoredTokens:
        """Return the tokens; the upload was sent."""
        groups, first = [], 0
        for sequences, contexts, num_blocks in self._staged:
            attention = torch.zeros(*contexts.array.shape, num_blocks, device=contexts.tensor.device)
            groups.append(ScoredGroup(first, sequences.tensor, contexts.tensor, attention))
            first += contexts.array.size
        return ScoredTokens(self._tokens.tensor, groups)


def is_asked(layout: HostStep, scored_from: Int64s) -> bool:
    """Return whether a step has a token from place `scored_from` on, one number for each of its sequences."""
    return bool((layout.context_lens > scored_from).any())


def attention_of(
    groups: Values[list[int]],
    answers: Iterator[torch.Tensor],
    sampled: Values[SampledTokens],
    drafts: Values[Draft] | None,
) -> list[tuple[int, list[float]]]:
    """Return what `StepResult.attention` tells: tokens of rejected drafts do not count."""
    found = []
    for group in groups:
        for place, attention in zip(group, next(answers), strict=True):
            num_rejected = 0 if drafts is None else len(drafts[place]) - sampled[place].num_accepted
            found.append((place, attention[: max(0, len(attention) - num_rejected)].sum(0).tolist()))
    return found


class SampledRows(Struct, frozen=True, gc=False):
    """Rows of logits, in the order of the step's tokens.

    Attributes:
        tokens: `[num_rows]`, the token that each is behind.
        rows: `[num_rows]`, the row in the batch of its sequence.
        positions: `[num_rows]`, place in its output of what each row samples.
        paths: The drafts that each row takes for granted; None where every row is behind a sequence's last token.
    """

    tokens: Int64s
    rows: Int64s
    positions: Int64s
    paths: list[tuple[int, ...]] | None = None

    def tiles(self, size: int) -> list[SampledRows]:
        """Return at most `size` rows at a time."""
        if len(self.rows) <= size:
            return [self]
        parts = [slice(start, start + size) for start in range(0, len(self.rows), size)]
        return [
            SampledRows(self.tokens[part], self.rows[part], self.positions[part], self.paths and self.paths[part])
            for part in parts
        ]


def rows_behind_drafts(last: Int64s, rows: Int64s, positions: Int64s, drafts: Values[Draft]) -> SampledRows:
    """Return the rows of sequences that verify drafts: one behind the last known token, then one behind each draft."""
    depths = [depth for draft in drafts for depth in range(len(draft) + 1)]
    paths = [path for draft in drafts for path in draft.paths()]
    counts = np.array([len(draft) + 1 for draft in drafts], dtype=np.int64)
    ends = counts.cumsum()
    tokens = np.repeat(last + 1 - ends, counts) + np.arange(len(depths), dtype=np.int64)
    positions = np.repeat(positions, counts) + np.array(depths, dtype=np.int64)
    return SampledRows(tokens, np.repeat(rows, counts), positions, paths)


@dataclass(slots=True, eq=False)
class AssembledStep:
    """A plan, and where its tokens are.

    Attributes:
        shares: Of each sequence; of a step that only decodes, made only where they are wanted.
        layout: Of its tokens, drafts included.
        prompt_lens: Of each sequence, as `BatchRows` has them.
        departed: Sequences that have left the batch since the step was submitted.
        sampling_drafts: The drafts of the sequences that sample; None when there are none at all.
        is_decode: Each sequence computes its last token and drafts, and samples behind all of these.
        adapters: Which tokens have an adapter; None where none has.
        scores: Which tokens are asked how they attend; None where none is.
    """

    plan: StepPlan
    shares: Values[Share]
    layout: HostStep
    prompt_lens: Int64s
    drafts: list[Draft] | None = None
    sequences: Values[BatchSequence] = ()
    adapters: AdapterRows | None = None
    scores: StagedScores | None = None
    departed: set[BatchSequence] = field(default_factory=set)
    samples: list[bool] = field(init=False)
    sampling_drafts: list[Draft] | None = field(init=False, default=None)
    is_decode: bool = field(init=False)

    def __post_init__(self) -> None:
        plan, num_tokens = self.plan, len(self.layout.token_ids)
        self.samples = [True] * plan.num_decodes + plan.samples
        if self.drafts is not None:
            num_tokens -= sum(map(len, self.drafts))
            self.sampling_drafts = list(compress(self.drafts, self.samples))
        self.is_decode = num_tokens == len(self.samples) and all(plan.samples)

    def sampled_rows(self) -> SampledRows:
        """Return the rows behind the last tokens of the sequences that sample, and behind each of their drafts."""
        layout, drafts = self.layout, self.sampling_drafts
        # The token that follows the last known one has as many before it in the output as are known.
        last_tokens = layout.query_starts[1:].astype(np.int64) - 1
        rows, positions = layout.rows, layout.context_lens - self.prompt_lens
        if not all(self.samples):
            last_tokens, rows, positions = (array[self.samples] for array in (last_tokens, rows, positions))
        if drafts is None:
            return SampledRows(last_tokens, rows, positions)
        return rows_behind_drafts(last_tokens, rows, positions - np.array([len(draft) for draft in drafts]), drafts)
