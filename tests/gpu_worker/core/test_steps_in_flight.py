"""What is particular to planning a step while another one is in flight."""

import pytest

from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledStep, StepResult
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.sequences import make_sequence


def shares(plan: ScheduledStep) -> list[tuple[str, int, int]]:
    return [(item.sequence.id, item.start, item.num_tokens) for item in plan.scheduled]


def first_token(prompt: list[int]) -> int:
    """What the model generates first after the prompt."""
    harness = Harness()
    harness.add(sequence := make_sequence(prompt, max_tokens=1))
    harness.run()
    return harness.output[sequence.id][0]


def num_scheduled(harness: Harness, sequence: Sequence) -> int:
    return sum(item.sequence is sequence for plan in harness.runner.plans for item in plan.scheduled)


def test_decode_is_planned_from_the_token_that_is_being_sampled() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(sequence := make_sequence(6))
    assert shares(harness.schedule()) == [(sequence.id, 0, 6)]
    assert (sequence.num_tokens, sequence.num_pending_tokens, len(sequence.token_ids)) == (7, 1, 6)
    assert shares(harness.schedule()) == [(sequence.id, 6, 1)]
    assert (sequence.num_tokens, sequence.num_pending_tokens, len(sequence.token_ids)) == (8, 2, 6)
    harness.land()
    assert (sequence.num_tokens, sequence.num_pending_tokens, len(sequence.token_ids)) == (8, 1, 7)


def test_chunks_of_a_prompt_follow_each_other_in_flight() -> None:
    harness = Harness(max_steps_in_flight=2, max_num_batched_tokens=16)
    harness.add(sequence := make_sequence(40))
    assert shares(harness.schedule()) == [(sequence.id, 0, 16)]
    assert shares(harness.schedule()) == [(sequence.id, 16, 16)]
    assert harness.land() == []
    assert shares(harness.schedule()) == [(sequence.id, 32, 8)]
    harness.run_to_reference(sequence)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_sequence_whose_last_token_is_in_flight_is_not_scheduled_again(max_tokens: int, depth: int) -> None:
    harness = Harness(max_steps_in_flight=depth)
    harness.add(sequence := make_sequence(6, max_tokens=max_tokens))
    harness.run_to_reference(sequence)
    assert num_scheduled(harness, sequence) == max_tokens


@pytest.mark.parametrize(("depth", "num_wasted"), [(1, 0), (2, 1), (3, 2)])
def test_end_that_only_the_token_tells_wastes_the_steps_behind_it(depth: int, num_wasted: int) -> None:
    prompt = [5, 6, 7]
    stop = first_token(prompt)
    harness = Harness(max_steps_in_flight=depth)
    harness.add(sequence := make_sequence(prompt, max_tokens=100, stop_token_ids=(stop,)))
    (event,) = harness.step()
    assert (event.token_ids, event.finish) == ((stop,), "stop")
    harness.scheduler.check_integrity()
    harness.run()
    assert num_scheduled(harness, sequence) == 1 + num_wasted
    assert sequence.token_ids == [*prompt, stop]


def test_blocks_of_an_ended_sequence_go_back_once_its_last_step_has_landed() -> None:
    prompt = [5, 6, 7, 8, 9]
    harness = Harness(max_steps_in_flight=2, enable_prefix_caching=False)
    harness.add(sequence := make_sequence(prompt, stop_token_ids=(first_token(prompt),)))
    harness.step()
    assert harness.finish == {sequence.id: "stop"}
    assert harness.scheduler.stats.free_blocks == 62
    assert harness.scheduler.has_work(), "a step is to be landed"
    assert harness.try_schedule() is None
    assert harness.land() == []
    assert harness.scheduler.stats.free_blocks == 64
    assert not harness.scheduler.has_work()


def test_aborted_and_expired_sequences_end_under_two_steps_in_flight() -> None:
    harness = Harness(max_steps_in_flight=2, max_num_batched_tokens=64)
    aborted, expiring, other = make_sequence(6), make_sequence(6, deadline=5.0), make_sequence(6)
    harness.add(aborted, expiring, other)
    harness.schedule()
    harness.schedule()
    harness.scheduler.abort(aborted.id)
    harness.scheduler.check_integrity()
    assert [event.sequence for event in harness.land()] == [expiring, other]
    harness.now = 5.0
    assert [item.sequence for item in harness.schedule().scheduled] == [other]
    assert harness.runner.plans[-1].departed == [aborted, expiring]
    assert {event.sequence: event.finish for event in harness.land()} == {expiring: "expired", other: None}
    harness.run()
    assert len(harness.output[expiring.id]) == 1
    harness.assert_reference(other)


def test_nobody_is_preempted_under_a_step_in_flight_when_the_pool_runs_out() -> None:
    harness = Harness(num_blocks=6, max_num_batched_tokens=64, max_steps_in_flight=2, headroom_tokens=0)
    stays, yields = make_sequence(11, max_tokens=12), make_sequence(11, max_tokens=12)
    harness.add(stays, yields)
    harness.schedule()
    harness.schedule()
    harness.land()
    while (plan := harness.try_schedule()) is not None:
        assert not plan.departed
        harness.land()
    assert yields.status is SequenceStatus.RUNNING
    harness.land()
    assert harness.schedule().departed == [yields]
    harness.run_to_reference(stays, yields)


def test_blocks_in_flight_are_not_findable_until_their_step_has_landed() -> None:
    harness = Harness(max_num_batched_tokens=64, max_steps_in_flight=2)
    first, early, late = (make_sequence(range(100, 120), max_tokens=30) for _ in range(3))
    harness.add(first)
    harness.schedule()
    harness.add(early)
    assert shares(harness.schedule()) == [(first.id, 20, 1), (early.id, 0, 20)]
    harness.land()
    harness.add(late)
    assert shares(harness.schedule())[-1] == (late.id, 16, 4)
    harness.run_to_reference(first, early, late)


def test_prompt_logprobs_are_reported_once_and_in_order() -> None:
    harness = Harness(max_num_seqs=2, max_steps_in_flight=2)
    asking, only_asking = make_sequence(40, prompt_logprobs=0), make_sequence(30, max_tokens=0, prompt_logprobs=0)
    harness.add(asking, only_asking)
    entries: dict[str, list[int]] = {asking.id: [], only_asking.id: []}
    while harness.scheduler.has_work():
        for event in harness.step():
            entries[event.sequence.id] += [entry.token_id for entry in event.prompt_logprobs]
    assert entries == {asking.id: asking.token_ids[1:40], only_asking.id: only_asking.token_ids[1:]}
    harness.assert_reference(asking)
    assert (harness.output[only_asking.id], harness.finish[only_asking.id]) == ([], "length")


def test_failed_step_is_undone_with_the_step_behind_it_and_planned_again_share_by_share() -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=8, max_steps_in_flight=2)
    hit, other = make_sequence(8, max_tokens=6), make_sequence(5, max_tokens=6)
    harness.add(hit, other)
    assert shares(harness.schedule()) == [(hit.id, 0, 8)]
    assert shares(harness.schedule()) == [(hit.id, 8, 1), (other.id, 0, 5)]
    items = harness.lose()
    assert [(item.sequence, item.start, item.num_tokens) for item in items] == [(hit, 0, 8)]
    assert (hit.num_computed_tokens, hit.num_pending_tokens, other.num_computed_tokens) == (0, 0, 0)
    harness.scheduler.check_integrity()
    plan = harness.schedule_again(items)
    assert plan is not None
    assert (shares(plan), plan.departed) == ([(hit.id, 0, 8)], [hit, other])
    harness.run_to_reference(hit, other)


def test_share_of_a_sequence_whose_deadline_has_passed_since_is_not_computed_again() -> None:
    harness = Harness()
    late, other = make_sequence(6, deadline=5.0), make_sequence(6)
    harness.add(late, other)
    harness.schedule()
    items = harness.lose()
    harness.now = 6.0
    assert harness.schedule_again(items[:1]) is None
    harness.run()
    assert (harness.finish[late.id], harness.output[late.id]) == ("expired", [])
    harness.assert_reference(other)


def test_share_of_a_sequence_that_ended_since_is_not_planned_again() -> None:
    harness = Harness()
    gone, other = make_sequence(6), make_sequence(6)
    harness.add(gone, other)
    harness.schedule()
    items = harness.lose()
    harness.scheduler.abort(gone.id)
    assert harness.schedule_again(items[:1]) is None
    plan = harness.schedule_again(items)
    assert plan is not None
    assert shares(plan) == [(other.id, 0, 6)]
    harness.run_to_reference(other)


def test_control_step_writes_only_where_nobody_reads() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(first := make_sequence(range(100, 108), max_tokens=9))
    harness.step()
    harness.add(sharing := make_sequence(range(100, 108), max_tokens=9))
    harness.schedule()
    harness.lose()
    plan = harness.scheduler.control_step(sharing)
    (item,) = plan.scheduled
    assert (item.start, item.num_tokens, item.samples) == (0, 1, True)
    (block,) = item.sequence.block_table
    assert block in sharing.block_table
    assert block not in first.block_table
    harness.runner.submit(plan).result()
    harness.fail(sharing)
    harness.run_to_reference(first)
    assert harness.finish[sharing.id] == "failed"


def test_steps_land_in_the_order_in_which_they_were_planned() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_sequence(6))
    harness.schedule()
    later = harness.schedule()
    with pytest.raises(AssertionError, match="not the oldest"):
        harness.scheduler.settle(later, StepResult(later.step, [SampledTokens((1,))]))


def test_slot_of_a_sequence_that_ends_in_flight_is_free_for_the_next_plan() -> None:
    harness = Harness(max_num_seqs=1, max_steps_in_flight=2)
    prompt = [5, 6, 7]
    ending, waiting = make_sequence(prompt, stop_token_ids=(first_token(prompt),)), make_sequence(4)
    harness.add(ending, waiting)
    harness.step()
    plan = harness.schedule()
    assert (plan.departed, shares(plan)) == ([ending], [(waiting.id, 0, 4)])
    harness.run_to_reference(waiting)
