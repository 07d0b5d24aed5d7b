"""Drafts that are accepted as often as a script says, whatever the model thinks: what verification costs and brings.

The script takes the place of a proposer's skill, which random weights cannot show, and of its time, which is none.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Values

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest


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
