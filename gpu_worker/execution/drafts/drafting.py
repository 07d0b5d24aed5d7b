"""A step's drafts: asked of a proposer that saw earlier steps; and the tokens and states left after verification.

A step leaves a recurrent state after the last token that is not a draft, because a wrong draft could not be undone.
Layers keep a few numbers for each draft token, from which the state after the accepted drafts is computed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Values

import numpy as np

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.draft import MAX_DRAFT_TOKENS, NO_DRAFT, Draft
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.drafts.computed_steps import ComputedStep, KeptSteps
from gpu_worker.execution.drafts.proposer import DraftRequest, Proposer
from gpu_worker.execution.memory.kv_cache import StatePool
from gpu_worker.models.decoder import CausalLM
from kernels.state_rows import StateRows

logger = logging.getLogger(__name__)


class Drafting:
    """Asks a proposer. One that raises is never asked again: requests go on without it, and no slower than before."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer: Proposer | None = proposer
        self._kept = KeptSteps()
        self._vocab_size = vocab_size
        self.wants_hidden = proposer.wants_hidden

    def drafts(self, shares: Values[Share], forced: list[Draft] | None = None) -> list[Draft] | None:
        """Return the drafts of each share, or None when there are none at all.

        Args:
            shares: Those with `num_draft_tokens` are asked for, but for those whose tokens are forced. May be empty
                where there are none of these.
            forced: Drafts of those, none of the others; None when there are no such sequences.
        """
        places = [place for place, item in enumerate(shares) if item.num_draft_tokens and not item.forced]
        if places or self._kept.is_full:
            self._show_kept()
        drafts = [NO_DRAFT] * len(shares) if forced is None else forced
        if self._proposer is not None and places:
            try:
                for place, draft in zip(places, self._ask(self._proposer, shares, places), strict=True):
                    drafts[place] = draft
            except Exception:
                self._give_up()
        return drafts if any(drafts) else None

    def forget(self, departed: Values[BatchSequence]) -> None:
        """Let the proposer drop what it keeps for sequences that have left the batch."""
        if self._proposer is None:
            return
        self._kept.forget(departed)
        try:
            for sequence in departed:
                self._proposer.forget(sequence)
        except Exception:
            self._give_up()

    def observe(self, step: ComputedStep) -> None:
        """Keep what a step computed, to show it to the proposer when that is next asked."""
        if self._proposer is not None:
            self._kept.add(step)

    def _show_kept(self) -> None:
        if self._proposer is None:
            return
        try:
            for computed in self._kept.take():
                self._proposer.observe(computed)
        except Exception:
            self._give_up()

    def _ask(self, proposer: Proposer, shares: Values[Share], places: Values[int]) -> list[Draft]:
        requests = [DraftRequest(shares[place].sequence, shares[place].num_draft_tokens) for place in places]
        drafts = []
        for request, draft in zip(requests, proposer.propose(requests), strict=True):
            usable = draft.first(request.num_tokens).valid(self._vocab_size)
            drafts.append(_allowed(usable, request.sequence.constraint))
        return drafts

    def _give_up(self) -> None:
        """Call it while an exception is handled."""
        logger.exception("the proposer of drafts failed; speculation is off until the worker starts again")
        self._proposer, self.wants_hidden, self._kept = None, False, KeptSteps()


def _allowed(draft: Draft, constraint: OutputConstraint | None) -> Draft:
    if constraint is None or not draft:
        return draft
    allowed = itertools.takewhile(constraint.allows, draft.paths()[1:])
    return draft.first(sum(1 for _ in allowed))


def forced_drafts(shares: Values[Share], most: int) -> list[Draft]:
    """Return the forced tokens of each share, `most` at most; further forced tokens wait for the next step.

    Recurrent layers keep what they computed for a limited number of drafts only.
    """
    return [Draft(share.forced[: min(most, MAX_DRAFT_TOKENS)]) if share.forced else NO_DRAFT for share in shares]


Accepted = Mapping[int, int]
"""How many draft tokens were accepted, by the sequence's place in the step."""

Entries = dict[int, tuple[LogprobEntry, ...]]
"""The log probabilities of a row's token, for the rows that report them."""


def accepted_tokens(drafts: Values[Draft], token_ids: Values[int], entries: Entries) -> list[SampledTokens]:
    """Return the tokens of each sequence: those sampled behind accepted draft tokens, and at the end one more."""
    sampled, first = [], 0
    for draft in drafts:
        num_accepted = draft.num_accepted(token_ids[first : first + len(draft) + 1])
        rows = range(first, first + num_accepted + 1)
        reported = tuple(entry for row in rows for entry in entries.get(row, ()))
        sampled.append(SampledTokens(tuple(token_ids[first : rows.stop]), reported, (), len(draft), num_accepted))
        first += len(draft) + 1
    return sampled


def replay_accepted(model: CausalLM, states: StatePool, layout: HostStep, accepted: Accepted) -> None:
    """Take the states through the drafts that a step accepted."""
    places = [place for place, count in accepted.items() if count]
    if not places:
        return
    assert layout.state_slots is not None, "the model has recurrent layers"
    slots, lengths = layout.state_slots[places], np.array([accepted[place] for place in places], dtype=np.int32)
    # Where the drafts of each sequence begin when they are laid end to end, then how many there are.
    starts = np.concatenate((np.zeros(1, dtype=np.int32), lengths.cumsum(dtype=np.int32)))
    first = np.repeat(slots * states.max_draft_tokens - starts[:-1], lengths)
    kept = first + np.arange(len(first), dtype=np.int64)
    upload = Upload(model.device)
    # As contexts, more tokens than there are drafts: no sequence is new.
    staged = [upload.add(array) for array in (kept, slots, starts, lengths + np.int32(1))]
    upload.send()
    of_drafts, own_slots, own_starts, contexts = (array.tensor for array in staged)
    model.replay_drafts(of_drafts, states.layers, StateRows(own_slots, own_starts, contexts, int(lengths.max())))
