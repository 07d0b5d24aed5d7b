"""The drafts of a step: asked from a proposer, made harmless, and compared with what was sampled behind them."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Values

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.speculative.proposer import DraftRequest, Proposer

logger = logging.getLogger(__name__)


class Drafting:
    """Asks a proposer. One that raises is never asked again: requests go on without it, and no slower than before."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        """Ask `proposer` for tokens below `vocab_size`."""
        self._proposer: Proposer | None = proposer
        self._vocab_size = vocab_size

    def drafts(self, scheduled: Values[ScheduledSequence], departed: Values[Sequence]) -> list[tuple[int, ...]] | None:
        """Return the drafts of each scheduled sequence, or None when there are none at all.

        Args:
            scheduled: Those with `num_draft_tokens` are asked for.
            departed: Left the batch since the last call; the proposer forgets them.
        """
        if self._proposer is None:
            return None
        try:
            return self._ask(self._proposer, scheduled, departed)
        except Exception:
            logger.exception("the proposer of drafts failed; speculation is off until the worker starts again")
            self._proposer = None
            return None

    def _ask(
        self, proposer: Proposer, scheduled: Values[ScheduledSequence], departed: Values[Sequence]
    ) -> list[tuple[int, ...]] | None:
        for sequence in departed:
            proposer.forget(sequence)
        places = [place for place, item in enumerate(scheduled) if item.num_draft_tokens]
        if not places:
            return None
        requests = [DraftRequest(scheduled[place].sequence, scheduled[place].num_draft_tokens) for place in places]
        drafts: list[tuple[int, ...]] = [()] * len(scheduled)
        for place, request, guess in zip(places, requests, proposer.propose(requests), strict=True):
            drafts[place] = self._valid(guess[: request.num_tokens])
        return drafts if any(drafts) else None

    def _valid(self, guess: tuple[int, ...]) -> tuple[int, ...]:
        for index, token_id in enumerate(guess):
            if not 0 <= token_id < self._vocab_size:
                return guess[:index]
        return guess


def num_accepted(drafts: tuple[int, ...], token_ids: Values[int]) -> int:
    """Return how many drafts were right.

    Args:
        drafts: The guesses.
        token_ids: What was sampled in place of each, and then one more: `token_ids[j]` given `drafts[:j]`.
    """
    for index, draft in enumerate(drafts):
        if token_ids[index] != draft:
            return index
    return len(drafts)
