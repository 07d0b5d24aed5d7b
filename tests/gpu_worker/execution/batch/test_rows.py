from __future__ import annotations

import random

import numpy as np
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.transfers import Upload
from shared.sampling import Sampling

CPU = torch.device("cpu")


def test_rows_and_device_tables_follow_random_traffic() -> None:
    generator, rows = random.Random(4), BatchRows(5, 7, CPU)
    present: list[Sequence] = []
    for step in range(300):
        departed = [sequence for sequence in present if generator.random() < 0.2]
        present = [sequence for sequence in present if sequence not in departed]
        while len(present) < 5 and generator.random() < 0.6:
            present.append(Sequence(str(step), [1], 1, Sampling(), 9))
        for sequence in present:
            if generator.random() < 0.3:
                # Blocks of wrong drafts go back; others may come in their place before the next step.
                sequence.block_table = sequence.block_table[: generator.randint(0, 7)]
            room = 7 - len(sequence.block_table)
            sequence.block_table += generator.choices(range(1000), k=generator.randint(0, room))
        scheduled = [ScheduledSequence(s, 0, 1, True) for s in generator.sample(present, k=len(present))]
        known = {sequence.row for sequence in present} - {None}
        upload = Upload(CPU)
        rows.release(departed)
        placed, newcomers = rows.place(scheduled, upload)
        upload.send()
        assert known <= set(placed.tolist())
        assert len(set(placed.tolist())) == len(placed) == len(known) + len(newcomers)
        for row, item in zip(placed.tolist(), scheduled, strict=True):
            table = item.sequence.block_table
            assert item.sequence.row == row < rows.spare
            assert rows.tables[row, : len(table)].tolist() == table
            assert rows.block_tables(torch.tensor([row]))[0, : len(table)].tolist() == table
        assert all(sequence.row is None for sequence in departed)


def test_sequences_that_never_had_a_row_depart_without_harm() -> None:
    rows = BatchRows(1, 2, CPU)
    stranger = Sequence("a", [1], 1, Sampling(), 9)
    rows.release([stranger, stranger])
    placed, newcomers = rows.place([ScheduledSequence(stranger, 0, 1, True)], Upload(CPU))
    assert np.array_equal(placed, [0])
    assert newcomers == [stranger]


def test_table_whose_upload_was_never_sent_is_written_again_after_its_row_was_released() -> None:
    rows, sequence = BatchRows(2, 4, CPU), Sequence("s", [1], 1, Sampling(), 9, block_table=[5, 7])
    item = ScheduledSequence(sequence, 0, 1, True)
    rows.place([item], Upload(CPU))
    rows.release([sequence])
    rows.tables[:] = 0
    upload = Upload(CPU)
    (row,), newcomers = rows.place([item], upload)
    upload.send()
    assert newcomers == [sequence]
    assert rows.block_tables(torch.tensor([row])).tolist() == [[5, 7, 0, 0]]
