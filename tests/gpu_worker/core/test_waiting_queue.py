import random

from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.waiting_queue import WaitingQueue
from tests.gpu_worker.core.sequences import make_sequence


def ordered(number: int) -> Sequence:
    sequence = make_sequence(3)
    sequence.order = (0, 0, 0.0, number)
    return sequence


def test_sequences_leave_in_order_and_tokens_are_counted() -> None:
    queue = WaitingQueue()
    for number in (2, 0, 1):
        queue.push(ordered(number))
    assert (len(queue), queue.num_tokens) == (3, 9)
    assert [queue.pop().order[3] for _ in range(3)] == [0, 1, 2]
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)


def test_discarded_sequence_is_skipped() -> None:
    queue = WaitingQueue()
    first, second = ordered(0), ordered(1)
    queue.push(first)
    queue.push(second)
    first.status = SequenceStatus.FINISHED
    queue.discard(first)
    assert len(queue) == 1
    assert queue.pop() is second


def test_discarding_many_sweeps_them_out() -> None:
    queue = WaitingQueue()
    sequences = [ordered(number) for number in range(1000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        sequence.status = SequenceStatus.FINISHED
        queue.discard(sequence)
    assert len(queue._heap) < 100
    assert queue.pop() is sequences[0]


def test_those_that_are_left_behind_a_sweep_leave_in_order() -> None:
    queue, chance = WaitingQueue(), random.Random(1)
    sequences = [ordered(number) for number in range(300)]
    for sequence in chance.sample(sequences, 300):
        queue.push(sequence)
    leaving, staying = set(chance.sample(range(300), 200)), []
    for number, sequence in enumerate(sequences):
        if number in leaving:
            sequence.status = SequenceStatus.FINISHED
            queue.discard(sequence)
        else:
            staying.append(number)
    assert len(queue._heap) < 300
    assert [queue.pop().order[3] for _ in staying] == staying
