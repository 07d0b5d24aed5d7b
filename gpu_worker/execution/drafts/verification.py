"""What remains of a step's drafts: the tokens that they brought, and states behind them.

A step leaves a recurrent state after the last token that is not a draft, because a wrong draft could not be undone.
Layers keep a few numbers for each draft token, from which the state after the accepted drafts is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values

import numpy as np

from gpu_worker.core.draft import Draft
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.state_pool import StatePool
from gpu_worker.models.decoder import CausalLM
from kernels.state_rows import StateRows

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
