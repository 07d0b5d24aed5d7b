"""Which drafts the states of recurrent layers are to remember, once it is known which of them were accepted.

A step leaves the state behind the last token that is no draft: what a wrong draft did to it could not be taken back.
What layers computed of the drafts is kept, a few numbers a token, and those that were accepted are taken from there.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Int32s, Int64s, Upload
from gpu_worker.execution.drafts.verification import Accepted
from gpu_worker.execution.memory.state_pool import StatePool
from gpu_worker.models.decoder import CausalLM
from kernels.state_rows import StateRows


class AcceptedRows(Struct, frozen=True, gc=False):
    """The sequences of a step that accepted drafts.

    Attributes:
        slots: `[num_seqs]`, where their states are.
        lengths: `[num_seqs]`, the drafts that each accepted, its first ones.
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
    """Return the sequences that accepted drafts, which are chains; None where there are none."""
    places = [place for place, path in accepted.items() if path]
    if not places:
        return None
    lengths = np.array([len(accepted[place]) for place in places], dtype=np.int32)
    assert layout.state_slots is not None, "the model has recurrent layers"
    return AcceptedRows(layout.state_slots[places], lengths)
