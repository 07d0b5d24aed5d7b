import random

from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.waiting_queue import TenantQueues, WaitingQueue
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


def of_tenant(tenant: str, number: int, *, rank: int = 0, priority: int = 0) -> Sequence:
    sequence = make_sequence(3, tenant=tenant, priority=priority)
    sequence.order = (rank, -priority, 0.0, number)
    return sequence


def test_tenant_that_uses_least_goes_first_and_each_in_its_order() -> None:
    queue = TenantQueues()
    for number in range(4):
        queue.push(of_tenant("greedy", number))
    queue.push(of_tenant("polite", 4))
    assert (len(queue), queue.num_tokens) == (5, 15)
    queue.used = {"greedy": 0.5, "polite": 0.1}
    assert queue.pop().tenant == "polite"
    assert [queue.pop().order[3] for _ in range(4)] == [0, 1, 2, 3]
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)


def test_rank_and_priority_go_before_what_tenants_use() -> None:
    queue = TenantQueues()
    queue.used = {"greedy": 0.5, "polite": 0.1}
    urgent, tried = of_tenant("greedy", 0, priority=1), of_tenant("greedy", 1)
    for sequence in (tried, urgent, of_tenant("polite", 2, rank=2, priority=9), of_tenant("polite", 3)):
        queue.push(sequence)
    assert [queue.pop().order[3] for _ in range(4)] == [0, 3, 1, 2]


def test_without_use_the_order_is_that_of_one_queue() -> None:
    queue, chance = TenantQueues(), random.Random(2)
    numbers = chance.sample(range(100), 100)
    sequences = [of_tenant(chance.choice("abc"), number) for number in numbers]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[:30]:
        sequence.status = SequenceStatus.FINISHED
        queue.discard(sequence)
    assert [queue.pop().order[3] for _ in range(len(queue))] == sorted(numbers[30:])


def test_tenant_whose_last_sequence_has_left_is_forgotten() -> None:
    queue = TenantQueues()
    ended, started = of_tenant("a", 0), of_tenant("b", 1)
    queue.push(ended)
    queue.push(started)
    ended.status = SequenceStatus.FINISHED
    queue.discard(ended)
    assert queue._queues.keys() == {"b"}
    queue.pop()
    assert not queue._queues
