"""Tokens and hidden vectors of landed steps, kept until the proposer is next asked for drafts.

While a batch drafts nothing, most steps are never shown to the proposer, because their sequences depart first. So only
references are kept, and what the proposer needs is worked out when it is asked. Consecutive decode steps of the same
sequences are shown as one chunk of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.step import SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import uploaded
from gpu_worker.execution.drafts.proposer import ComputedTokens

MAX_KEPT_TOKENS = 512
"""When more tokens are kept, the proposer is shown them even if it is not asked: their vectors take memory."""

_FEW_ROWS = 64
"""A sequence with so few rows decodes and verifies drafts; with more it has a chunk of a prompt."""


@dataclass(slots=True, eq=False)
class ComputedStep:
    """What a landed step computed of each sequence that goes on. Iterate to work it out.

    Attributes:
        hidden: `[num_tokens, hidden_size]`, of all tokens of the layout.
        departed: Sequences that have left the batch since the step was submitted; they are not shown.
        is_whole_decode: The step was a decode of all its sequences, without drafts, and all of them go on.
    """

    shares: Values[Share]
    layout: HostStep
    hidden: torch.Tensor
    sampled: Values[SampledTokens]
    departed: set[BatchSequence]
    is_whole_decode: bool = field(init=False)
    _places: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Find out which sequences failed; that cannot be told later."""
        for item, tokens in zip(self.shares, self.sampled, strict=True):
            item.sequence.has_failed = item.sequence.has_failed or tokens.error is not None
        # Where a step before failed for a sequence, the token that this step computed is not known.
        self._places = [place for place, item in enumerate(self.shares) if not item.sequence.has_failed]
        is_whole = self.layout.max_query_len == 1 and len(self._places) == len(self.shares)
        self.is_whole_decode = is_whole and all(tokens.token_ids for tokens in self.sampled)

    def __iter__(self) -> Iterator[ComputedTokens]:
        places = [place for place in self._places if self.shares[place].sequence not in self.departed]
        token_ids, rows = [], []
        for place in places:
            item = self.shares[place]
            first, end = int(self.layout.query_starts[place]), item.start + item.num_tokens
            following = self.sampled[place].token_ids or tuple(item.sequence.token_ids[end : end + 1])
            token_ids.append((*item.sequence.token_ids[item.start : end], *following))
            rows.append(range(first, first + len(token_ids[-1]) - 1))
        vectors = _apart(self.hidden, rows)
        items = [self.shares[place] for place in places]
        columns = zip(items, token_ids, vectors, strict=True)
        return iter([ComputedTokens(item.sequence, item.start, tokens, vector) for item, tokens, vector in columns])

    def continues(self, before: ComputedStep) -> bool:
        """Return whether both are decodes of the same sequences, and this one computed the next token of each."""
        if not (self.is_whole_decode and before.is_whole_decode) or len(self.shares) != len(before.shares):
            return False
        pairs = zip(self.shares, before.shares, strict=True)
        return self.departed == before.departed and all(
            item.sequence is last.sequence and item.start == last.start + 1 for item, last in pairs
        )


def _decode_run(steps: Values[ComputedStep]) -> Iterator[ComputedTokens]:
    """Show consecutive decode steps of the same sequences as one step that computed all their tokens."""
    first = steps[0]
    hidden = torch.stack([step.hidden for step in steps], dim=1)
    for place, (item, vectors) in enumerate(zip(first.shares, hidden.unbind(), strict=True)):
        if item.sequence not in first.departed:
            sampled = [step.sampled[place].token_ids[0] for step in steps]
            token_ids = (item.sequence.token_ids[item.start], *sampled)
            yield ComputedTokens(item.sequence, item.start, token_ids, vectors)


class KeptSteps:
    """Owns the steps that the proposer has not been shown."""

    def __init__(self) -> None:
        self._steps: list[ComputedStep] = []
        self._num_tokens = 0

    @property
    def is_full(self) -> bool:
        """Return whether the proposer should be shown them even if it is not asked."""
        return self._num_tokens > MAX_KEPT_TOKENS

    def add(self, step: ComputedStep) -> None:
        """Keep a step, which landed after all that are kept."""
        self._steps.append(step)
        self._num_tokens += len(step.layout.token_ids)

    def forget(self, departed: Iterable[BatchSequence]) -> None:
        """Show nothing of sequences that have left the batch, should they come back or not."""
        for step in self._steps:
            step.departed.update(departed)

    def take(self) -> list[Iterable[ComputedTokens]]:
        """Return the tokens to show to the proposer, in order, and keep them no longer."""
        runs: list[list[ComputedStep]] = []
        for step in self._steps:
            if runs and step.continues(runs[-1][-1]):
                runs[-1].append(step)
            else:
                runs.append([step])
        self._steps, self._num_tokens = [], 0
        return [_decode_run(run) if run[0].is_whole_decode else run[0] for run in runs]


def _apart(hidden: torch.Tensor, places: list[range]) -> list[torch.Tensor]:
    """Return the rows at these places, one tensor a sequence.

    Chunks of prompts are views. A view keeps the vectors of the whole step in memory, so the few rows of other
    sequences are copied, in one operation for all.
    """
    few = [part for part in places if len(part) <= _FEW_ROWS]
    rows = uploaded(np.array([row for part in few for row in part], dtype=np.int64), hidden.device)
    copies = iter(hidden.index_select(0, rows).split_with_sizes([len(part) for part in few]))
    return [next(copies) if len(part) <= _FEW_ROWS else hidden[part[0] : part[-1] + 1] for part in places]
