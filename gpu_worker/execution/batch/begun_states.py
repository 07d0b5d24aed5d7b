"""Adds recurrent states to a step: where they are, and copies of checkpoints for sequences that start from one."""

from __future__ import annotations

from collections.abc import Sequence as Values

from msgspec import structs

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.plan import StateWork
from gpu_worker.execution.batch.layout import StepLayout
from gpu_worker.execution.batch.state_layout import lay_out_states, state_copies
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.state_pool import StatePool


def begin_states(
    states: StatePool,
    layout: StepLayout,
    sequences: Values[BatchSequence],
    works: Values[tuple[int, StateWork]],
    upload: Upload,
) -> StepLayout:
    """Return the layout with states. Sequences that start from a checkpoint get a copy when the upload arrives."""
    copies = state_copies(sequences, works)
    if copies is not None:
        sources, targets = (upload.add(array) for array in copies)
        upload.on_arrival(lambda: states.copy(sources.tensor, targets.tensor))
    return structs.replace(layout, states=lay_out_states(sequences, works))
