"""What remains of a step's drafts: the tokens that they brought, and states behind them.

A step leaves a recurrent state after the last token that is not a draft, because a wrong draft could not be undone.
Layers keep a few numbers for each draft token, from which the state after the accepted drafts is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values

import numpy as np
from msgspec import Struct

from gpu_worker.core.draft import Draft
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Int32s, Int64s, Upload
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


class AcceptedRows(Struct, frozen=True, gc=False):
    """The sequences of a step that accepted drafts.

    Attributes:
        slots: `[num_seqs]`, where their states are.
        lengths: `[num_seqs]`, how many drafts each accepted.
    """

    slots: Int64s
    lengths: Int32s

    @property
    def query_starts(self) -> Int32s:
        """Return where the drafts of each sequence begin when they are laid end to end, then how many there are."""
        return np.concatenate((np.zeros(1, dtype=np.int32), self.lengths.cumsum(dtype=np.int32)))

    @property
    def context_lens(self) -> Int32s:
        """Return more tokens than there are drafts: no sequence is new."""
        return self.lengths + np.int32(1)

    def places(self, max_draft_tokens: int) -> Int64s:
        """Return the place of each draft among those that are kept."""
        first = np.repeat(self.slots * max_draft_tokens - self.query_starts[:-1], self.lengths)
        return first + np.arange(len(first), dtype=np.int64)


def replay_accepted(model: CausalLM, states: StatePool, layout: HostStep, accepted: Accepted) -> None:
    """Take the states through the drafts that a step accepted."""
    rows = accepted_rows(layout, accepted)
    if rows is None:
        return
    upload = Upload(model.device)
    staged = [upload.add(array) for array in (rows.slots, rows.query_starts, rows.context_lens)]
    places = upload.add(rows.places(states.max_draft_tokens))
    upload.send()
    slots, starts, contexts = (array.tensor for array in staged)
    most = int(rows.lengths.max())
    model.replay_drafts(places.tensor, states.layers, StateRows(slots, starts, contexts, most))


def accepted_rows(layout: HostStep, accepted: Accepted) -> AcceptedRows | None:
    """Return the sequences that accepted drafts; None where there are none."""
    places = [place for place, count in accepted.items() if count]
    if not places:
        return None
    lengths = np.array([accepted[place] for place in places], dtype=np.int32)
    assert layout.state_slots is not None, "the model has recurrent layers"
    return AcceptedRows(layout.state_slots[places], lengths)
