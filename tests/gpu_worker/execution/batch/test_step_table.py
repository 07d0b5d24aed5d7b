"""From plans to the arrays that layers read; what graphs make of padded ones is in `test_graphs`."""

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.draft import Draft
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import StateWork, StepPlan
from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.placed_tokens import Frame, axis_positions, text_positions
from gpu_worker.execution.batch.step_table import FIELDS, copy_states, lay_out, no_step, padded
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.kv_cache import StatePool
from gpu_worker.layers.cache_layout import LayerState
from shared.sampling import Sampling
from tests.gpu_worker.plans import decodes_of

CPU = torch.device("cpu")
BLOCK = 4
TABLES = np.arange(40, dtype=np.int32).reshape(5, 8)


def in_rows(*items: tuple[int | None, StateWork | None]) -> tuple[list[BatchSequence], StepPlan]:
    """Return sequences with these slots, in rows 2, 0, 1 and so on, and a plan that decodes them."""
    sequences = [
        BatchSequence(row, "a", [1], 1, Sampling(), state_slot=slot)
        for row, (slot, _) in zip((2, 0, 1, 3, 4), items, strict=False)
    ]
    rows = [sequence.row for sequence in sequences]
    works = [(place, work) for place, (_, work) in enumerate(items) if work is not None]
    return sequences, StepPlan(1, rows, [0] * len(rows), len(rows), len(rows), [1] * len(rows), states=works)


def test_arrays_have_the_types_of_the_table_at_any_size() -> None:
    sequences, plan = in_rows((7, StateWork(False, saves=((1, 9),))), (8, None))
    whole = lay_out(plan, sequences, Frame(TABLES, BLOCK, has_states=True), [Draft((5, 6)), Draft()])
    masks = GraphShape(9, 4, 9, has_drafts=True, has_logits=False)
    for step in (whole, padded(whole, masks, 4, 12), padded(no_step(1), masks, 4, 12)):
        for field in FIELDS:
            array = getattr(step, field.name)
            assert (array.dtype, array.flags.c_contiguous) == (np.dtype(field.dtype), True), field.name


def test_only_states_that_begin_from_another_slot_are_copied() -> None:
    part = torch.arange(10.0)[:, None]
    states = StatePool([None, LayerState((part,), None)], 0)
    items = [
        (7, StateWork(True, source=3)),
        (8, StateWork(True)),
        (5, StateWork(True, source=5)),
        (4, StateWork(False, saves=((4, 2),))),
        (1, StateWork(True, source=3)),
    ]
    upload = Upload(CPU)
    sequences, plan = in_rows(*items)
    copy_states(states, sequences, plan.states, upload)
    upload.send()
    assert part.view(-1).tolist() == [0, 3, 2, 3, 4, 5, 6, 3, 8, 9]


def test_checkpoints_are_copied_when_the_upload_arrives_though_their_slots_are_written_too() -> None:
    part = torch.arange(5.0)[:, None]
    states = StatePool([None, LayerState((part,), None)], 0)
    # Slots 1 and 2 change places.
    sequences = [BatchSequence(slot - 1, str(slot), [7, 8], 2, Sampling(), state_slot=slot) for slot in (1, 2)]
    works = [(place, StateWork(True, source)) for place, source in enumerate((2, 1))]
    plan = decodes_of([Share(sequence, 1, 1, True) for sequence in sequences])
    upload = Upload(CPU)
    step = lay_out(plan, sequences, Frame(TABLES, BLOCK, has_states=True))
    copy_states(states, sequences, works, upload)
    assert step.state_slots is not None
    assert step.state_slots.tolist() == [1, 2]
    assert part.view(-1).tolist() == [0, 1, 2, 3, 4]
    upload.send()
    assert part.view(-1).tolist() == [0, 2, 1, 3, 4]


# Four tokens that count as two positions each, the second image directly behind the first.
SPANS = [MediaSpan(2, 4, b"a" * 32, 4, (2, 2)), MediaSpan(6, 4, b"b" * 32, 4, (2, 2))]
POSITIONS = [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 7]


def test_positions_are_the_same_wherever_a_step_begins_and_ends() -> None:
    for start in range(len(POSITIONS)):
        for end in range(start + 1, len(POSITIONS) + 1):
            places = np.arange(start, end, dtype=np.int64)
            assert text_positions(SPANS, places).tolist() == POSITIONS[start:end]


def test_image_counts_its_rows_and_columns_on_the_other_axes() -> None:
    assert axis_positions(SPANS, 5, 6).tolist() == [[2, 4, 4, 4, 4, 6], [3, 4, 4, 5, 5, 6], [3, 4, 5, 4, 5, 6]]
