"""A step's drafts: asked of a proposer that saw earlier steps; and the tokens and states left after verification.

A step leaves a recurrent state after the last token that is not a draft, because a wrong draft could not be undone.
Layers keep a few numbers for each draft token, from which the state after the accepted drafts is computed.

Tokens and hidden vectors of landed steps, kept until the proposer is next asked for drafts.

While a batch drafts nothing, most steps are never shown to the proposer, because their sequences depart first. So only
references are kept, and what the proposer needs is worked out when it is asked. Consecutive decode steps of the same
sequences are shown as one chunk of each sequence.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.draft import MAX_DRAFT_TOKENS, NO_DRAFT, Draft
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Upload, uploaded
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest, Proposer
from gpu_worker.execution.memory.kv_cache import StatePool
from gpu_worker.models.decoder import CausalLM
from kernels.state_rows import StateRows

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
