"""What plans tell, and what they cost to encode; that they are enough is in `paged_oracle` and `test_plans_alone`."""

from __future__ import annotations

import time

import msgspec

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.plan import UNKNOWN_TOKEN, StepPlan, Written
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from tests.gpu_worker.core.sequences import make_sequence

NUM_DECODES = 256
MAX_ENCODE_S = 100e-6
MAX_BYTES = 10_000


def decodes(*sequences: Sequence) -> list[ScheduledSequence]:
    return [ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, True) for sequence in sequences]


def test_new_sequence_is_told_in_full_and_then_only_what_has_changed() -> None:
    writer, sequence = PlanWriter(), make_sequence([7, 8, 9])
    sequence.block_table = [4]
    plan = writer.write_any(decodes(sequence))
    assert [(new.row, new.token_ids, new.num_prompt_tokens) for new in plan.new] == [(0, [7, 8, 9], 3)]
    assert plan.blocks == [Written(0, 0, [4])]
    assert plan.token_ids == [UNKNOWN_TOKEN]
    sequence.token_ids.append(5)
    sequence.block_table.append(6)
    plan = writer.write_any(decodes(sequence))
    assert (plan.new, plan.token_ids, plan.tokens, plan.blocks) == ([], [5], [], [Written(0, 1, [6])])
    # Its next token is being sampled.
    plan = writer.write_any([ScheduledSequence(sequence, 4, 1, True)])
    assert (plan.token_ids, plan.tokens, plan.blocks) == ([UNKNOWN_TOKEN], [], [])
    sequence.token_ids += [1, 2, 3]
    plan = writer.write_any(decodes(sequence))
    assert (plan.token_ids, plan.tokens) == ([UNKNOWN_TOKEN], [Written(0, 4, [1, 2, 3])])


def test_drafts_are_told_of_decodes_alone() -> None:
    decode, chunk = make_sequence(3), make_sequence(9)
    shares = [
        ScheduledSequence(decode, 2, 1, True, num_draft_tokens=2, forced=(5, 6)),
        ScheduledSequence(chunk, 0, 8, False),
    ]
    plan = PlanWriter().write_any(shares)
    assert (plan.num_decodes, plan.num_drafts, plan.forced) == (1, [2], [(0, (5, 6))])
    assert (plan.lengths, plan.samples, plan.num_tokens) == ([8], [False], 9)


def test_blocks_of_a_window_are_told_once_and_not_again_when_some_were_given_back() -> None:
    writer, sequence = PlanWriter(), make_sequence(3)
    sequence.window_tables = (table := WindowTable([4, 5], 0, 0, 0),)
    assert writer.write_any(decodes(sequence)).blocks == [Written(0, 0, [4, 5], 1)]
    table.num_released = 1
    assert writer.write_any(decodes(sequence)).blocks == []
    table.blocks.append(6)
    assert writer.write_any(decodes(sequence)).blocks == [Written(0, 2, [6], 1)]


def test_preempted_sequence_departs_and_is_told_in_full_again_in_the_same_plan() -> None:
    writer, first, second = PlanWriter(), make_sequence(3), make_sequence(3)
    writer.write_any(decodes(first, second))
    first.token_ids.append(5)
    plan = writer.write_any(decodes(second, first), [first])
    assert plan.departed == [0]
    assert plan.rows == [1, 0]
    assert [new.token_ids for new in plan.new] == [first.token_ids]


def test_tokens_that_were_replaced_are_told_again() -> None:
    writer, sequences = PlanWriter(), BatchSequences()
    for length in (1, 2, 5):
        sequence = make_sequence(length)
        sequences.apply(writer.write_any(decodes(sequence)))
        sequence.token_ids += [1, 2, 3]
        sequences.apply(writer.write_any(decodes(sequence)))
        for kept, new in ((length + 2, [7]), (length, []), (length, [8, 9]), (length + 1, [6])):
            PlanWriter.rewind(sequence, kept)
            sequence.token_ids[kept:] = new
            plan = writer.write_any(decodes(sequence))
            sequences.apply(plan)
            assert sequences.of(plan.rows)[0].token_ids == sequence.token_ids


def test_plan_of_many_decodes_is_small_and_encoded_fast() -> None:
    writer = PlanWriter()
    running = [make_sequence(1000 + number, max_tokens=4000) for number in range(NUM_DECODES)]
    for sequence in running:
        sequence.block_table = list(range(70))
    writer.write_any(decodes(*running))
    for number, sequence in enumerate(running):
        sequence.token_ids.append(127_000 + number)
        if number % 16 == 0:
            sequence.block_table.append(60_000 + number)
    plan = writer.write_any(decodes(*running))
    encode, durations = msgspec.msgpack.Encoder().encode, []
    for _ in range(200):
        started = time.perf_counter()
        data = encode(plan)
        durations.append(time.perf_counter() - started)
    assert len(data) <= MAX_BYTES
    assert min(durations) <= MAX_ENCODE_S
    assert msgspec.msgpack.decode(data, type=StepPlan) == plan
