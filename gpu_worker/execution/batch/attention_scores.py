"""Finds the tokens of a step that are asked how they attend, and reads what they answer."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Values
from itertools import groupby

import numpy as np
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.step import SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Int64s, StagedArray, Upload
from gpu_worker.layers.scored_tokens import ScoredGroup, ScoredTokens


class StagedScores:
    """The tokens, on their way to the device."""

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
