from __future__ import annotations

import pytest

from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import ScheduledStep
from tests.gpu_worker.core.parts import Parts


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_sequence_is_known_until_it_has_finished(parts: Parts) -> None:
    waiting, running = parts.wait(4), parts.run(4, lane="batch")
    assert (len(parts.live), parts.live.get(waiting.id), parts.live.get("other")) == (2, waiting, None)
    # People come first, whoever was there before.
    assert parts.live.ordered == [waiting, running]
    parts.live.finish(waiting)
    assert waiting.status is SequenceStatus.FINISHED
    assert (len(parts.live), parts.live.get(waiting.id), len(parts.live.waiting["interactive"])) == (1, None, 0)
    parts.live.finish(running)
    assert (len(parts.live), len(parts.live.running)) == (0, 0)
    assert parts.blocks.pool.num_available == 16
    parts.live.check_integrity()


def test_preempted_sequence_waits_at_its_old_place_without_blocks(parts: Parts) -> None:
    sequence, other = parts.run(6, arrival=1.0), parts.wait(6, arrival=2.0)
    assert parts.blocks.pool.num_available == 14
    parts.live.preempt(sequence)
    assert (sequence.status, sequence.num_preemptions, sequence.block_table) == (SequenceStatus.PREEMPTED, 1, [])
    assert parts.blocks.pool.num_available == 16
    assert parts.live.waiting["interactive"].peek() is sequence
    assert parts.live.ordered == [sequence, other]
    assert parts.live.running.take_departed() == [sequence]
    parts.live.check_integrity()


def test_blocks_of_an_ended_sequence_go_back_when_the_last_step_planned_by_then_has_landed(parts: Parts) -> None:
    sequence, other = parts.run(6), parts.run(6)
    sequence.next_publish = 5
    first = parts.decode(sequence, other)
    second = parts.decode(other)
    parts.live.finish(sequence)
    assert sequence.next_publish == 0
    num_held = 16 - parts.blocks.pool.num_available
    parts.live.land(first)
    assert (16 - parts.blocks.pool.num_available, parts.live.num_landed) == (num_held, 1)
    parts.live.land(second)
    assert (16 - parts.blocks.pool.num_available, parts.live.num_landed) == (num_held - 2, 2)
    assert sequence.block_table == []


def test_blocks_of_a_sequence_that_no_step_names_go_back_at_once(parts: Parts) -> None:
    sequence, other = parts.run(6), parts.run(6)
    parts.decode(other)
    parts.live.finish(sequence)
    assert sequence.block_table == []
    assert other.block_table != []


def test_chunk_of_a_prompt_in_flight_keeps_its_blocks(parts: Parts) -> None:
    sequence, other = parts.run(6), parts.run(6)
    plan = parts.decode(other)
    # As after a chunk that samples nothing.
    sequence.last_chunk_step = plan.step
    parts.live.finish(sequence)
    assert sequence.block_table != []
    parts.live.land(plan)
    assert sequence.block_table == []


def test_step_without_sequences_has_no_number(parts: Parts) -> None:
    sequence = parts.run(6)
    plan = parts.decode(sequence)
    empty = ScheduledStep(99, [], 0)
    parts.live.add_step(empty)
    assert (parts.live.num_planned, list(parts.live.in_flight)) == (1, [plan, empty])
    with pytest.raises(AssertionError, match="oldest"):
        parts.live.land(empty)
    parts.live.land(plan)
    parts.live.land(empty)
    assert (parts.live.num_planned, parts.live.num_landed, len(parts.live.in_flight)) == (1, 1, 0)
    with pytest.raises(AssertionError, match="not in flight"):
        parts.live.land(plan)
