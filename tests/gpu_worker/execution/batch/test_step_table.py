"""From plans to the arrays that layers read; what graphs make of padded ones is in `test_graphs`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences, Share
from gpu_worker.core.draft import Draft
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import StateWork, StepPlan
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.placed_tokens import Frame, axis_positions, text_positions
from gpu_worker.execution.batch.rows import BatchRows, BlockTables
from gpu_worker.execution.batch.step_table import FIELDS, copy_states, lay_out, no_step, padded
from gpu_worker.execution.batch.transfers import Downloads, Upload
from gpu_worker.execution.memory.kv_cache import StatePool
from gpu_worker.layers.cache_layout import LayerState
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import DEVICES
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


def test_tables_on_a_device_are_of_the_form_of_the_hosts() -> None:
    tables = BlockTables(3, 5, torch.device("meta"))
    assert (tables.device.shape, tables.device.dtype) == (tables.host.shape, torch.from_numpy(tables.host).dtype)


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


def test_rows_and_device_tables_follow_random_traffic() -> None:
    generator, rows, writer, sequences = random.Random(4), BatchRows(5, 7, CPU), PlanWriter(), BatchSequences()
    present: list[Sequence] = []
    for step in range(300):
        departed = [sequence for sequence in present if generator.random() < 0.2]
        present = [sequence for sequence in present if sequence not in departed]
        while not present or (len(present) < 5 and generator.random() < 0.6):
            present.append(Sequence(str(step), [1] * (1 + step % 3), 1 + step % 3, Sampling(), 9))
        for sequence in present:
            if generator.random() < 0.3:
                # Blocks of wrong drafts go back; others may come in their place before the next step.
                count = generator.randint(0, len(sequence.block_table))
                del sequence.block_table[count:]
                sequence.num_told_blocks = min(sequence.num_told_blocks, count)
            room = 7 - len(sequence.block_table)
            sequence.block_table += generator.choices(range(1000), k=generator.randint(0, room))
        scheduled = [ScheduledSequence(s, 0, 1, True) for s in generator.sample(present, k=len(present))]
        known = {sequence.row for sequence in present} - {None}
        plan, upload = writer.write_any(scheduled, departed), Upload(CPU)
        changes = sequences.apply(plan)
        rows.follow(plan, upload)
        upload.send()
        assert known <= set(plan.rows)
        assert len(set(plan.rows)) == len(plan.rows) == len(known) + len(changes.new)
        for row, item in zip(plan.rows, scheduled, strict=True):
            table = item.sequence.block_table
            assert item.sequence.row == row < rows.spare
            assert rows.prompt_lens[row] == item.sequence.num_prompt_tokens
            assert rows.whole.host[row, : len(table)].tolist() == table
            assert rows.whole.of(torch.tensor([row]))[0, : len(table)].tolist() == table
        assert all(sequence.row is None for sequence in departed)
        assert {sequence.id for sequence in changes.departed} == {sequence.id for sequence in departed}


def test_table_whose_upload_was_never_sent_is_written_again_after_its_row_was_released() -> None:
    rows, writer, sequence = BatchRows(2, 4, CPU), PlanWriter(), Sequence("s", [1], 1, Sampling(), 9)
    sequence.block_table = [5, 7]
    item = ScheduledSequence(sequence, 0, 1, True)
    rows.follow(writer.write_any([item]), Upload(CPU))
    rows.whole.host[:] = 0
    plan, upload = writer.write_any([item], [sequence]), Upload(CPU)
    rows.follow(plan, upload)
    upload.send()
    assert [new.id for new in plan.new] == ["s"]
    assert rows.whole.of(torch.tensor(plan.rows)).tolist() == [[5, 7, 0, 0]]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("is_copied", [True, None])
def test_arrays_of_all_kinds_arrive_aligned(device: torch.device, is_copied: bool | None) -> None:
    arrays = [
        np.arange(3, dtype=np.int32),
        np.array([], dtype=np.int64),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.array([2**62, -1], dtype=np.int64),
    ]
    upload = Upload(device, is_copied=is_copied)
    staged = [upload.add(array) for array in arrays]
    seen: list[list[int]] = []
    upload.on_arrival(lambda: seen.append(staged[0].tensor.tolist()))
    upload.send()
    assert seen == [[0, 1, 2]]
    for array, each in zip(arrays, staged, strict=True):
        assert each.tensor.device.type == device.type
        assert each.tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert each.tensor.tolist() == array.tolist()
        assert each.tensor.data_ptr() % 16 == 0
        assert each.tensor.is_contiguous()


def test_upload_into_bound_memory_shows_in_its_tensors(device: torch.device) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8, device=device)
    first = Upload(device, is_copied=True)
    bound = [first.add(np.zeros(5, dtype=np.int32)), first.add(np.zeros(2, dtype=np.int64))]
    first.bind(buffer)
    second = Upload(device, is_copied=True)
    second.add(np.arange(5, dtype=np.int32))
    second.add(np.array([7, 8], dtype=np.int64))
    second.send_into(buffer)
    assert [each.tensor.tolist() for each in bound] == [[0, 1, 2, 3, 4], [7, 8]]


def test_empty_upload_only_acts(device: torch.device) -> None:
    upload, acted = Upload(device), []
    upload.on_arrival(lambda: acted.append(True))
    upload.send()
    assert acted == [True]


def test_downloads_return_what_was_computed_before_they_started(device: torch.device) -> None:
    downloads = Downloads(device)
    values = torch.zeros(1000, device=device)
    pending = []
    for _ in range(20):
        values = values + 1
        pending.append(downloads.start([values, values[:2] * 2]))
    for number, download in enumerate(pending, start=1):
        whole, twice = download.wait()
        assert whole.device.type == "cpu"
        assert whole.tolist() == [number] * 1000
        assert twice.tolist() == [2 * number] * 2
