from __future__ import annotations

import random

import torch

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.transfers import Upload
from shared.sampling import Sampling

CPU = torch.device("cpu")


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
