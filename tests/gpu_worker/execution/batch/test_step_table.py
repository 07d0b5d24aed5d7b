"""From plans to the arrays that layers read; what graphs make of padded ones is in `test_graphs`."""

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences, Share
from gpu_worker.core.draft import ROOT, SEES_ALL, Draft
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.plan import StateWork, StepPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.graph_shapes import GraphShape, mixed_shape
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_table import (
    FIELDS,
    Frame,
    HostStep,
    StagedStep,
    copy_states,
    lay_out,
    no_step,
    padded,
    step_context,
)
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.kv_cache import allocate_groups
from gpu_worker.execution.memory.state_pool import StatePool, allocate_states
from gpu_worker.layers.cache_layout import CacheLayout, KeepsState, KeepsTokens, StatePart
from gpu_worker.layers.layer_state import LayerState
from kernels.layer_cache import CacheShape
from shared.sampling import Sampling
from tests.gpu_worker.plans import decodes_of, plan_of

CPU = torch.device("cpu")
SHAPE = CacheShape(1, 8, 8)
BLOCK = 4
LAYOUT = CacheLayout(
    (KeepsTokens(SHAPE, None), KeepsTokens(SHAPE, 5), KeepsState((StatePart((2,), torch.float32),)), None)
)
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


def with_states(*items: tuple[int | None, StateWork | None]) -> HostStep:
    sequences, plan = in_rows(*items)
    return lay_out(plan, sequences, Frame(TABLES, BLOCK, has_states=True))


def shape(num_tokens: int, num_seqs: int) -> GraphShape:
    return mixed_shape(num_tokens, num_seqs, has_masks=False)


def test_layers_find_their_groups_tables_and_states() -> None:
    cache = allocate_groups(LAYOUT, [10, 6], BLOCK, torch.float32, CPU)
    states = allocate_states(LAYOUT, 3, 0, CPU)
    rows = BatchRows(3, 4, CPU, num_windows=1)
    sequence = Sequence("a", list(range(6)), 6, Sampling(), 1, block_table=[9, 4])
    sequence.window_tables = (WindowTable([3, 5], 0, 2, 0),)
    sequences, plan, upload = BatchSequences(), plan_of([ScheduledSequence(sequence, 5, 1, True)]), Upload(CPU)
    sequences.apply(plan)
    rows.follow(plan, upload)
    windows = [tables.host for tables in rows.windows]
    frame = Frame(rows.tables, BLOCK, has_states=True)
    staged = StagedStep(lay_out(plan, sequences.of(plan.rows), frame, None, windows), upload)
    upload.send()
    context = step_context(staged.tensors, rows, cache, states, max_context_len=6)
    # Token 5 is the second of the second block, in each group's own blocks.
    assert context.slot_mapping.tolist() == [4 * BLOCK + 1]
    assert context.block_tables[0].tolist() == [9, 4, 0, 0]
    (window,) = context.windows
    assert window.slot_mapping.tolist() == [5 * BLOCK + 1]
    assert window.block_tables[0].tolist() == [3, 5, 0, 0]
    assert context.group_of_layer == (0, 1, None, None)
    assert [state is None for state in context.states] == [True, True, False, True]
    assert context.state_rows is not None
    assert context.state_rows.slots.tolist() == plan.rows
    assert context.context_lens.tolist() == [6]
    assert np.array_equal(context.query_starts.numpy(), [0, 1])
    assert step_context(staged.tensors, rows, cache, None, 6).states == ()


def test_chunks_decodes_and_drafts_lie_end_to_end() -> None:
    known = [list(range(10, 17)), list(range(30, 42)), [50, 51, 52]]
    sequences = [BatchSequence(row, "a", tokens, 3, Sampling()) for row, tokens in zip((1, 3, 0), known, strict=True)]
    plan = StepPlan(1, [1, 3, 0], [6, 4, 3], 6, 1, [16], [4, 1], [False, True])
    drafts = [Draft((7, 8, 9), (ROOT, ROOT, 1)), Draft(), Draft()]
    step = lay_out(plan, sequences, Frame(TABLES, BLOCK), drafts, knows_tokens=False)
    # The last one's token is being sampled.
    assert step.token_ids.tolist() == [16, 7, 8, 9, 34, 35, 36, 37, -1]
    assert step.token_rows.tolist() == [1] * 4 + [3] * 4 + [0]
    assert step.positions.tolist() == [6, 7, 7, 8, 4, 5, 6, 7, 3]
    assert step.slots.tolist() == [9 * 4 + 2, 9 * 4 + 3, 10 * 4, 10 * 4 + 1, *range(25 * 4, 26 * 4), 3]
    assert step.query_starts.tolist() == [0, 4, 8, 9]
    assert step.context_lens.tolist() == [10, 8, 4]
    assert step.num_kept is not None
    assert step.num_kept.tolist() == [1, 4, 1]
    assert step.tree_masks is not None
    assert step.tree_masks.tolist() == [*drafts[0].masks(), *[SEES_ALL] * 5]
    assert (step.max_query_len, step.max_context_len) == (4, 10)


def test_arrays_have_the_types_of_the_table_at_any_size() -> None:
    sequences, plan = in_rows((7, StateWork(False, saves=((1, 9),))), (8, None))
    whole = lay_out(plan, sequences, Frame(TABLES, BLOCK, has_states=True), [Draft((5, 6), (ROOT, ROOT)), Draft()])
    masks = GraphShape(9, 4, 9, has_masks=True, has_logits=False)
    for step in (whole, padded(whole, masks, 4, 12), padded(no_step(1), masks, 4, 12)):
        for field in FIELDS:
            array = getattr(step, field.name)
            assert (array.dtype, array.flags.c_contiguous) == (np.dtype(field.dtype), True), field.name


def test_sequences_without_a_slot_have_that_of_their_row() -> None:
    step = with_states((7, None), (None, None), (5, None))
    assert step.state_slots is not None
    assert step.state_slots.tolist() == [7, 0, 5]
    assert (step.save_starts, step.save_tokens, step.save_slots) == (None, None, None)
    sequences, plan = in_rows((7, None))
    assert lay_out(plan, sequences, Frame(TABLES, BLOCK)).state_slots is None


def test_saves_of_all_sequences_lie_end_to_end() -> None:
    first, third = StateWork(False, saves=((4, 9),)), StateWork(True, saves=((8, 3), (16, 6)))
    step = with_states((7, first), (8, None), (5, third))
    arrays = (step.save_starts, step.save_tokens, step.save_slots)
    assert [array.tolist() for array in arrays if array is not None] == [[0, 1, 1, 3], [4, 8, 16], [9, 3, 6]]


def test_padded_states_have_room_for_a_copy_behind_each_token() -> None:
    first, third = StateWork(False, saves=((4, 9),)), StateWork(True, saves=((8, 3), (16, 6)))
    step = padded(with_states((7, first), (8, None), (5, third)), shape(32, 5), 4, 12)
    arrays = (step.state_slots, step.save_starts, step.save_tokens, step.save_slots)
    slots, starts, tokens, targets = (array.tolist() for array in arrays if array is not None)
    assert slots == [7, 8, 5, 12, 12]
    assert starts == [0, 1, 1, 3, 3, 3]
    assert tokens == [4, 8, 16] + [0] * 29
    assert targets == [9, 3, 6] + [12] * 29


def test_padded_states_without_copies_are_of_the_same_sizes() -> None:
    step = padded(with_states((7, None)), shape(3, 2), 4, 12)
    arrays = (step.state_slots, step.save_starts, step.save_tokens, step.save_slots)
    slots, starts, tokens, targets = (array.tolist() for array in arrays if array is not None)
    assert (slots, starts, len(tokens), len(targets)) == ([7, 12], [0, 0, 0], 3, 3)


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
