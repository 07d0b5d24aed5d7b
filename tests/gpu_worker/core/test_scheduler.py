import pytest

from gpu_worker.core.scheduler import DuplicateSequenceError, Scheduler, SchedulerConfig
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import LogprobEntry, SampledTokens, StepPlan, StepResult
from shared.errors import BadRequestError, PromptTooLongError
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.sequences import EOS, make_sequence


def shares(plan: StepPlan) -> list[tuple[str, int]]:
    return [(item.sequence.id, item.num_tokens) for item in plan.scheduled]


def test_mixed_sequences_generate_what_a_contiguous_model_does() -> None:
    harness = Harness()
    sequences = [make_sequence(length, max_tokens=20) for length in (1, 3, 4, 5, 16, 17, 40)]
    harness.add(*sequences)
    harness.run()
    harness.assert_reference(*sequences)


def test_long_prompt_is_computed_in_chunks_and_never_delays_a_decode() -> None:
    harness = Harness(max_num_batched_tokens=16)
    stream, prompt = make_sequence(4, max_tokens=50), make_sequence(100, max_tokens=1)
    harness.add(stream)
    harness.step()
    harness.add(prompt)
    for chunk in (15, 15, 15, 15, 15, 15, 10):
        plan = harness.schedule()
        assert shares(plan) == [(stream.id, 1), (prompt.id, chunk)]
        assert next(event.sequence for event in harness.settle(plan)) is stream
    assert harness.finish[prompt.id] == "length"


def test_prompts_share_the_budget_in_order_of_priority_then_arrival() -> None:
    harness = Harness(max_num_batched_tokens=16)
    later, first, urgent = make_sequence(10, arrival=2), make_sequence(10, arrival=1), make_sequence(10, priority=1)
    harness.add(later, first, urgent)
    assert shares(harness.schedule()) == [(urgent.id, 10), (first.id, 6)]


def test_sequence_that_the_budget_does_not_reach_is_not_started() -> None:
    harness = Harness(max_num_batched_tokens=16)
    first, second = make_sequence(16), make_sequence(4)
    harness.add(first, second)
    harness.schedule()
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert second.block_table == []


def test_sequences_start_in_order_of_arrival_when_slots_are_few() -> None:
    harness = Harness(max_num_seqs=1)
    sequences = [make_sequence(3, max_tokens=1) for _ in range(5)]
    harness.add(*reversed(sequences))
    harness.run()
    assert list(harness.finish) == [sequence.id for sequence in sequences]


def test_admission_waits_for_blocks_and_passes_nobody_by() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    holder, large, small = make_sequence(40, max_tokens=8), make_sequence(60, max_tokens=4), make_sequence(2)
    harness.add(holder, large, small)
    assert shares(harness.schedule()) == [(holder.id, 40)]
    assert (large.status, small.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)


def test_admission_keeps_headroom_for_what_runs() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    holder, newcomer = make_sequence(8, max_tokens=40), make_sequence(20, max_tokens=20)
    harness.add(holder, newcomer)
    assert shares(harness.schedule()) == [(holder.id, 8)]
    harness = Harness(num_blocks=22, max_num_batched_tokens=100)
    harness.add(make_sequence(8, max_tokens=40), make_sequence(20, max_tokens=20))
    assert len(harness.schedule().scheduled) == 2
    harness.scheduler.check_integrity()


def test_outgrowing_the_pool_preempts_the_latest_which_then_continues_identically() -> None:
    harness = Harness(num_blocks=70, max_num_batched_tokens=64)
    sequences = [make_sequence(4, max_tokens=200) for _ in range(3)]
    harness.add(*sequences)
    harness.run()
    harness.assert_reference(*sequences)
    # The first two fit with their headroom and outgrow the pool later; the third has to wait from the start.
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1, 0]
    assert harness.scheduler.stats.num_preemptions == 1


def test_preempted_sequence_finds_its_own_blocks_again() -> None:
    harness = Harness(num_blocks=40, max_num_seqs=1, max_num_batched_tokens=64)
    background = make_sequence(40, max_tokens=30, lane="batch")
    harness.add(background)
    harness.step()
    harness.add(make_sequence(4, max_tokens=1))
    plan = harness.schedule()
    assert plan.preempted == [background]
    harness.settle(plan)
    plan = harness.schedule()
    assert [(item.sequence.id, item.start, item.num_tokens) for item in plan.scheduled] == [(background.id, 40, 1)]
    assert background.num_cached_tokens == 0
    harness.settle(plan)
    harness.run()
    harness.assert_reference(background)


def test_interactive_takes_a_batch_slot_within_one_step() -> None:
    harness = Harness(max_num_seqs=2)
    older, newer = (make_sequence(4, max_tokens=50, lane="batch") for _ in range(2))
    harness.add(older, newer)
    harness.step()
    person = make_sequence(4)
    harness.add(person)
    plan = harness.schedule()
    assert plan.preempted == [newer]
    assert [item.sequence for item in plan.scheduled] == [older, person]
    harness.settle(plan)
    harness.run()
    harness.assert_reference(older, newer, person)


def test_interactive_takes_batch_blocks_within_one_step() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    background = make_sequence(40, max_tokens=20, lane="batch")
    harness.add(background)
    harness.step()
    person = make_sequence(50, max_tokens=4)
    harness.add(person)
    plan = harness.schedule()
    assert plan.preempted == [background]
    assert shares(plan) == [(person.id, 50)]
    harness.settle(plan)
    harness.run()
    harness.assert_reference(background, person)


def test_batch_is_left_alone_when_its_blocks_would_not_be_enough() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    holder, background = make_sequence(40, max_tokens=4), make_sequence(8, max_tokens=4, lane="batch")
    harness.add(holder, background)
    harness.step()
    harness.add(make_sequence(60, max_tokens=4))
    assert harness.schedule().preempted == []


def test_batch_does_not_start_while_interactive_waits() -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=100)
    harness.add(make_sequence(40, max_tokens=4))
    harness.step()
    harness.add(make_sequence(60, max_tokens=4), make_sequence(4, lane="batch", priority=100))
    assert len(harness.schedule().scheduled) == 1


def test_interactive_prompt_gets_the_budget_before_a_batch_prompt_that_started_earlier() -> None:
    harness = Harness(max_num_batched_tokens=16)
    background = make_sequence(100, lane="batch")
    harness.add(background)
    harness.step()
    person = make_sequence(20)
    harness.add(person)
    assert shares(harness.schedule()) == [(person.id, 16)]


def test_shared_prefix_is_computed_once() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first, second = make_sequence(range(100, 130)), make_sequence([*range(100, 125), 7, 7, 7])
    harness.add(first)
    harness.step()
    harness.add(second)
    plan = harness.schedule()
    assert shares(plan) == [(first.id, 1), (second.id, 28 - 24)]
    assert second.num_cached_tokens == 24
    harness.settle(plan)
    harness.run()
    harness.assert_reference(first, second)
    assert (harness.scheduler.stats.num_prefix_hits, harness.scheduler.stats.num_prefix_queries) == (24, 58)


def test_output_of_a_running_sequence_is_findable_as_its_blocks_fill() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first = make_sequence(6, max_tokens=100)
    harness.add(first)
    for _ in range(8):
        harness.step()
    follow_up = make_sequence([*first.token_ids, 7, 7])
    harness.add(follow_up)
    plan = harness.schedule()
    assert first.status is SequenceStatus.RUNNING
    assert follow_up.num_cached_tokens == (len(first.token_ids) - 1) // BLOCK * BLOCK == 12
    harness.settle(plan)
    harness.run()
    harness.assert_reference(first, follow_up)


def test_blocks_shared_with_a_running_sequence_are_not_counted_twice_at_admission() -> None:
    harness = Harness(num_blocks=16, max_num_batched_tokens=100)
    first, second = make_sequence(range(100, 140), max_tokens=4), make_sequence(range(100, 142), max_tokens=4)
    harness.add(first)
    harness.step()
    harness.add(second)
    assert shares(harness.schedule()) == [(first.id, 1), (second.id, 2)]


def test_disabled_prefix_cache_finds_nothing() -> None:
    harness = Harness(max_num_batched_tokens=64, enable_prefix_caching=False)
    sequences = [make_sequence(range(100, 130)) for _ in range(2)]
    for sequence in sequences:
        harness.add(sequence)
        harness.run()
    assert harness.scheduler.stats.num_prefix_hits == 0
    harness.assert_reference(*sequences)


def test_blocks_being_computed_are_not_findable_before_the_step_settled() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first, second = make_sequence(range(100, 120)), make_sequence(range(100, 120))
    harness.add(first, second)
    assert shares(harness.schedule()) == [(first.id, 20), (second.id, 20)]


def test_resumed_sequence_continues_after_its_emitted_tokens() -> None:
    harness = Harness()
    whole = make_sequence(10, max_tokens=20)
    harness.add(whole)
    harness.run()
    output = harness.output[whole.id]
    resumed = make_sequence(whole.token_ids[:10], emitted=output[:7], max_tokens=20)
    harness.add(resumed)
    harness.run()
    harness.assert_reference(resumed)


@pytest.mark.parametrize(("emitted", "reason"), [([5, 6, 7], "length"), ([5, EOS], "stop")])
def test_resumed_sequence_that_was_complete_only_finishes(emitted: list[int], reason: str) -> None:
    harness = Harness()
    sequence = make_sequence(10, emitted=emitted, max_tokens=3)
    harness.add(sequence)
    (event,) = harness.step()
    assert (event.token_ids, event.finish) == ((), reason)
    assert harness.runner.num_computed_tokens == 0
    assert not harness.scheduler.has_work()
    assert harness.scheduler.step == 0


def sampled(plan: StepPlan, *token_ids: int) -> StepResult:
    return StepResult(plan.step, [SampledTokens(token_ids if item.samples else ()) for item in plan.scheduled])


def test_eos_ends_the_sequence_and_is_delivered() -> None:
    harness = Harness()
    sequence = make_sequence(4)
    harness.add(sequence)
    (event,) = harness.scheduler.settle(plan := harness.schedule(), sampled(plan, EOS))
    assert (event.token_ids, event.finish) == ((EOS,), "stop")


def test_ignored_eos_does_not_end_the_sequence_but_a_stop_token_does() -> None:
    harness = Harness()
    harness.add(make_sequence(4, ignore_eos=True, stop_token_ids=(9,)))
    (event,) = harness.scheduler.settle(plan := harness.schedule(), sampled(plan, EOS))
    assert event.finish is None
    (event,) = harness.scheduler.settle(plan := harness.schedule(), sampled(plan, 9))
    assert event.finish == "stop"


def test_eos_at_the_end_of_the_prompt_does_not_end_the_sequence() -> None:
    harness = Harness()
    sequence = make_sequence([5, 6, EOS], max_tokens=3)
    harness.add(sequence)
    harness.run()
    harness.assert_reference(sequence)


def test_several_tokens_at_once_are_cut_at_the_stop_and_the_rest_is_caught_up() -> None:
    harness = Harness()
    sequence = make_sequence(4, max_tokens=10, logprobs=0)
    harness.add(sequence)
    harness.scheduler.settle(plan := harness.schedule(), sampled(plan, 1, 2, 3))
    plan = harness.schedule()
    assert [(item.start, item.num_tokens, item.samples) for item in plan.scheduled] == [(4, 3, True)]
    entries = tuple(LogprobEntry(token_id, -1.0) for token_id in (4, EOS, 6))
    result = StepResult(plan.step, [SampledTokens((4, EOS, 6), entries)])
    (event,) = harness.scheduler.settle(plan, result)
    assert (event.token_ids, event.num_tokens_before, event.finish) == ((4, EOS), 3, "stop")
    assert event.logprobs == entries[:2]
    assert sequence.token_ids[4:] == [1, 2, 3, 4, EOS]
    harness.scheduler.check_integrity()
    assert not harness.scheduler.has_work()


def test_sequence_ends_at_the_context_length() -> None:
    harness = Harness(max_model_len=20)
    sequence = make_sequence(15, max_tokens=100)
    harness.add(sequence)
    harness.run()
    assert (len(harness.output[sequence.id]), harness.finish[sequence.id]) == (5, "length")


def test_sequence_ends_when_it_fills_the_whole_pool() -> None:
    harness = Harness(num_blocks=5)
    sequence = make_sequence(15, max_tokens=100)
    harness.add(sequence)
    harness.run()
    assert len(sequence.token_ids) == 5 * BLOCK
    harness.assert_reference(sequence)


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(5, 1000), (100, 20)])
def test_prompt_that_can_never_fit_is_refused(num_blocks: int, max_model_len: int) -> None:
    harness = Harness(num_blocks=num_blocks, max_model_len=max_model_len)
    with pytest.raises(PromptTooLongError) as raised:
        harness.scheduler.add(make_sequence(20))
    assert (raised.value.num_prompt_tokens, raised.value.max_model_len) == (20, 20)
    assert not harness.scheduler.has_work()
    harness.add(make_sequence(19))
    harness.run()


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequestError, match="no tokens") as raised:
        Harness().scheduler.add(make_sequence([]))
    assert raised.value.param == "prompt"


def test_id_in_use_is_refused() -> None:
    harness = Harness()
    harness.add(make_sequence(4, id="same"))
    with pytest.raises(DuplicateSequenceError):
        harness.scheduler.add(make_sequence(4, id="same"))


def test_zero_max_tokens_finishes_at_once() -> None:
    harness = Harness()
    sequence = make_sequence(10, max_tokens=0)
    harness.add(sequence)
    harness.run()
    assert (harness.finish[sequence.id], harness.runner.num_computed_tokens) == ("length", 0)


@pytest.mark.parametrize("length", [1, 10, 40])
def test_zero_max_tokens_with_prompt_logprobs_computes_the_prompt_and_samples_nothing(length: int) -> None:
    harness = Harness()
    sequence = make_sequence(length, max_tokens=0, prompt_logprobs=0)
    harness.add(sequence)
    entries = []
    while harness.scheduler.has_work():
        entries += [entry.token_id for event in harness.step() for entry in event.prompt_logprobs]
    assert (harness.finish[sequence.id], harness.output[sequence.id]) == ("length", [])
    assert entries == sequence.token_ids[1:]


def test_prompt_logprobs_are_reported_once_even_after_preemption() -> None:
    harness = Harness(max_num_seqs=1)
    background = make_sequence(40, max_tokens=3, lane="batch", prompt_logprobs=0)
    harness.add(background)
    entries = [entry for event in harness.step() for entry in event.prompt_logprobs]
    harness.add(make_sequence(4, max_tokens=1))
    while harness.scheduler.has_work():
        entries += [e for event in harness.step() if event.sequence is background for e in event.prompt_logprobs]
    assert background.num_preemptions == 1
    assert [entry.token_id for entry in entries] == background.token_ids[1:40]
    harness.assert_reference(background)


def test_deadline_expires_waiting_and_running_sequences() -> None:
    harness = Harness(max_num_seqs=1)
    running, waiting, patient = make_sequence(4, deadline=5.0), make_sequence(4, deadline=5.0), make_sequence(4)
    harness.add(running, waiting, patient)
    harness.now = 4.9
    harness.step()
    assert harness.finish == {}
    harness.now = 5.0
    plan = harness.schedule()
    assert [item.sequence for item in plan.scheduled] == [patient]
    harness.settle(plan)
    assert harness.finish == {running.id: "expired", waiting.id: "expired"}
    harness.run()
    harness.assert_reference(patient)


def test_expiry_of_the_last_sequence_is_reported_without_a_step() -> None:
    harness = Harness()
    sequence = make_sequence(4, deadline=1.0)
    harness.add(sequence)
    harness.now = 2.0
    harness.step()
    assert harness.finish == {sequence.id: "expired"}
    assert harness.scheduler.step == 0


def test_abort_frees_blocks_at_once_and_makes_no_event() -> None:
    harness = Harness()
    running, waiting = make_sequence(20), make_sequence(100)
    harness.add(running, waiting)
    harness.step()
    assert harness.scheduler.abort(running.id) is running
    assert harness.scheduler.abort(waiting.id) is waiting
    assert harness.scheduler.abort("unknown") is None
    assert harness.scheduler.stats.free_blocks == harness.scheduler.stats.total_blocks
    assert not harness.scheduler.has_work()


def test_abort_of_a_sequence_in_flight_keeps_its_blocks_until_the_step_is_settled() -> None:
    harness = Harness(num_blocks=8)
    sequence = make_sequence(20)
    harness.add(sequence)
    plan = harness.schedule()
    assert harness.scheduler.abort(sequence.id) is sequence
    assert harness.scheduler.abort(sequence.id) is None
    assert harness.scheduler.stats.free_blocks == 3
    harness.scheduler.check_integrity()
    replacement = make_sequence(20, id=sequence.id)
    harness.scheduler.add(replacement)
    assert harness.settle(plan) == []
    assert harness.scheduler.stats.free_blocks == 8
    harness.output[replacement.id] = []
    harness.run()
    harness.assert_reference(replacement)


def test_failed_step_ends_its_sequences_and_no_others() -> None:
    harness = Harness(max_num_seqs=2)
    hit, aborted, waiting = make_sequence(4), make_sequence(4), make_sequence(4)
    harness.add(hit, aborted, waiting)
    plan = harness.schedule()
    harness.scheduler.abort(aborted.id)
    (event,) = harness.collect(harness.scheduler.fail(plan, "out of memory"))
    assert (event.sequence, event.finish, event.error) == (hit, "failed", "out of memory")
    harness.run()
    harness.assert_reference(waiting)


def test_settling_a_step_twice_is_refused() -> None:
    harness = Harness()
    harness.add(make_sequence(4))
    plan = harness.schedule()
    result = harness.runner.execute(plan)
    harness.scheduler.settle(plan, result)
    with pytest.raises(AssertionError, match="not in flight"):
        harness.scheduler.settle(plan, result)


def test_step_number_advances_only_with_completed_steps() -> None:
    harness = Harness()
    harness.step()
    assert harness.scheduler.step == 0
    harness.add(make_sequence(4, max_tokens=2))
    plan = harness.schedule()
    assert (plan.step, harness.scheduler.step) == (1, 0)
    harness.settle(plan)
    assert harness.scheduler.step == 1


def test_stats_count_sequences_tokens_and_blocks() -> None:
    harness = Harness(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=16)
    harness.add(make_sequence(4), make_sequence(20), make_sequence(7), make_sequence(9, lane="batch"))
    harness.step()
    stats = harness.scheduler.stats
    assert (stats.running, stats.waiting, stats.waiting_batch, stats.running_batch) == (2, 2, 1, 0)
    assert stats.waiting_tokens == (20 - 12) + 7 + 9
    assert stats.free_blocks == 64 - 1 - 5


def test_budget_smaller_than_the_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(SchedulerConfig(16, 10, 8, 7, 100))
