import random
from typing import Any

from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.waiting_queue import FairQueue, WaitingQueue
from tests.gpu_worker.core.sequences import make_sequence


def ordered(number: int) -> Sequence:
    sequence = make_sequence(3)
    sequence.order = (0, 0.0, number)
    return sequence


def test_sequences_leave_in_order_and_tokens_are_counted() -> None:
    queue = WaitingQueue()
    for number in (2, 0, 1):
        queue.push(ordered(number))
    assert (len(queue), queue.num_tokens) == (3, 9)
    assert [queue.pop().order[2] for _ in range(3)] == [0, 1, 2]
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
    assert [queue.pop().order[2] for _ in staying] == staying


def of_tenant(tenant: str, number: int, *, rank: int = 0, priority: int = 0, key: str = "") -> Sequence:
    sequence = make_sequence(3, tenant=tenant, priority=priority, key=key)
    sequence.order = (rank, 0.0, number)
    return sequence


def take(queue: FairQueue) -> Sequence:
    head = queue.peek()
    assert head is not None
    queue.take(head)
    return head


def serve(queue: FairQueue, num_tokens: int, **client: Any) -> None:
    """Compute so many prompt tokens for a client."""
    sequence = make_sequence(num_tokens, **client)
    sequence.num_input_tokens = sequence.num_computed_tokens = num_tokens
    queue.counters.charge(sequence)


def test_tenant_that_was_served_least_goes_first_and_each_in_its_order() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.push(of_tenant("greedy", number))
    queue.push(of_tenant("polite", 4))
    assert (len(queue), queue.num_tokens) == (5, 15)
    serve(queue, 1, tenant="greedy")
    assert take(queue).tenant == "polite"
    assert [take(queue).order[2] for _ in range(4)] == [0, 1, 2, 3]
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)


def test_rank_goes_before_what_tenants_were_served_and_priority_for_so_many_tokens() -> None:
    queue = FairQueue()
    for sequence in (of_tenant("greedy", 0, priority=1), of_tenant("polite", 1, rank=2, priority=9)):
        queue.push(sequence)
    for number in (2, 3):
        queue.push(of_tenant("third", number))
    serve(queue, 8191, tenant="greedy")
    first = queue.peek()
    assert first is not None
    assert first.tenant == "greedy"
    serve(queue, 2, tenant="greedy")
    assert [take(queue).order[2] for _ in range(4)] == [2, 3, 0, 1]


def test_keys_of_a_tenant_take_turns_by_what_they_were_served() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.push(of_tenant("a", number, key="busy"))
    queue.push(of_tenant("a", 3, key="quiet"))
    queue.push(of_tenant("b", 4, key="other"))
    serve(queue, 5, tenant="a", key="busy")
    serve(queue, 6, tenant="b", key="other")
    assert [take(queue).order[2] for _ in range(5)] == [3, 0, 1, 2, 4]


def test_tenant_that_returns_does_not_claim_what_it_did_not_ask_for() -> None:
    queue = FairQueue()
    queue.push(of_tenant("a", 0))
    serve(queue, 1000, tenant="a")
    # Never served: it stands where the other one does.
    late = of_tenant("late", 1)
    queue.push(late)
    assert queue.counters.standing(late) == (1000.0, 0.0)
    take(queue)
    take(queue)
    # Nobody waits: it is lifted to the one that waited last.
    serve(queue, 500, tenant="a")
    later = of_tenant("later", 2)
    queue.push(later)
    assert queue.counters.standing(later)[0] == 1500.0


def test_without_service_the_order_is_that_of_one_queue() -> None:
    queue, chance = FairQueue(), random.Random(2)
    numbers = chance.sample(range(100), 100)
    sequences = [of_tenant(chance.choice("abc"), number) for number in numbers]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[:30]:
        sequence.status = SequenceStatus.FINISHED
        queue.discard(sequence)
    assert [take(queue).order[2] for _ in range(len(queue))] == sorted(numbers[30:])


def test_tenant_whose_last_sequence_has_left_is_forgotten() -> None:
    queue = FairQueue()
    ended, started = of_tenant("a", 0), of_tenant("b", 1)
    queue.push(ended)
    queue.push(started)
    ended.status = SequenceStatus.FINISHED
    queue.discard(ended)
    assert queue._queues.keys() == {("b", "")}
    take(queue)
    assert not queue._queues


def test_accounts_of_clients_that_come_and_go_are_bounded() -> None:
    queue = FairQueue()
    staying = of_tenant("staying", 0)
    queue.push(staying)
    for number in range(10_000):
        passing = of_tenant(f"tenant-{number}", number + 1)
        queue.push(passing)
        passing.status = SequenceStatus.FINISHED
        queue.discard(passing)
    assert len(queue.counters.tenants.accounts) <= 4096
    assert len(queue.counters._keys) <= 4097
    assert take(queue) is staying
