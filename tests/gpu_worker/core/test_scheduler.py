import pytest

from gpu_worker.core.scheduler import Deadlines, DuplicateSequenceError, Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import LogprobEntry, SampledTokens, StepResult
from shared.errors import BadRequestError, PromptTooLongError
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.sequences import EOS, make_sequence


@pytest.mark.parametrize(("emitted", "reason"), [([5, 6, 7], "length"), ([5, EOS], "stop")])
def test_resumed_sequence_that_was_complete_only_finishes(emitted: list[int], reason: str) -> None:
    harness = Harness()
    harness.add(make_sequence(10, emitted=emitted, max_tokens=3))
    (event,) = harness.step()
    assert (event.token_ids, event.finish) == ((), reason)
    assert harness.runner.num_computed_tokens == 0
    assert not harness.scheduler.has_work()
    assert harness.scheduler.step == 0


def test_log_probabilities_of_a_token_come_with_it() -> None:
    harness = Harness()
    harness.add(make_sequence(4, max_tokens=10, logprobs=0))
    for token_id in (3, 4, 5):
        plan = harness.schedule()
        entries = (LogprobEntry(token_id, -1.0),)
        (event,) = harness.scheduler.settle(plan, StepResult(plan.step, [SampledTokens((token_id,), entries)]))
        assert (event.token_ids, event.logprobs) == ((token_id,), entries)


def test_eos_ends_the_sequence_and_is_delivered() -> None:
    harness = Harness()
    harness.add(make_sequence(4))
    harness.schedule()
    (event,) = harness.settle_as(EOS)
    assert (event.token_ids, event.finish) == ((EOS,), "stop")


def test_ignored_eos_does_not_end_the_sequence_but_a_stop_token_does() -> None:
    harness = Harness()
    harness.add(make_sequence(4, ignore_eos=True, stop_token_ids=(9,)))
    harness.schedule()
    (event,) = harness.settle_as(EOS)
    assert event.finish is None
    harness.schedule()
    (event,) = harness.settle_as(9)
    assert event.finish == "stop"


def test_eos_at_the_end_of_the_prompt_does_not_end_the_sequence() -> None:
    harness = Harness()
    harness.add(sequence := make_sequence([5, 6, EOS], max_tokens=3))
    harness.run_to_reference(sequence)


def test_several_tokens_at_once_are_cut_at_the_stop_and_the_rest_is_caught_up() -> None:
    harness = Harness()
    harness.add(sequence := make_sequence(4, max_tokens=10, logprobs=0))
    harness.schedule()
    harness.settle_as(1, 2, 3)
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
    harness.add(sequence := make_sequence(15, max_tokens=100))
    harness.run()
    assert (len(harness.output[sequence.id]), harness.finish[sequence.id]) == (5, "length")


def test_sequence_ends_when_it_fills_the_whole_pool() -> None:
    harness = Harness(num_blocks=5)
    harness.add(sequence := make_sequence(15, max_tokens=100))
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
    harness.add(sequence := make_sequence(10, max_tokens=0))
    harness.run()
    assert (harness.finish[sequence.id], harness.runner.num_computed_tokens) == ("length", 0)


@pytest.mark.parametrize("length", [1, 10, 40])
def test_zero_max_tokens_with_prompt_logprobs_computes_the_prompt_and_samples_nothing(length: int) -> None:
    harness = Harness()
    harness.add(sequence := make_sequence(length, max_tokens=0, prompt_logprobs=0))
    entries = []
    while harness.scheduler.has_work():
        entries += [entry.token_id for event in harness.step() for entry in event.prompt_logprobs]
    assert (harness.finish[sequence.id], harness.output[sequence.id]) == ("length", [])
    assert entries == sequence.token_ids[1:]


def test_prompt_logprobs_are_reported_once_even_after_preemption() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(background := make_sequence(40, max_tokens=3, lane="batch", prompt_logprobs=0))
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
    harness.run_to_reference(patient)


def test_expiry_of_the_last_sequence_is_reported_without_a_step() -> None:
    harness = Harness()
    harness.add(sequence := make_sequence(4, deadline=1.0))
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
    harness.add(sequence := make_sequence(20))
    plan = harness.schedule()
    assert harness.scheduler.abort(sequence.id) is sequence
    assert harness.scheduler.abort(sequence.id) is None
    assert harness.scheduler.stats.free_blocks == 3
    harness.scheduler.check_integrity()
    harness.scheduler.add(replacement := make_sequence(20, id=sequence.id))
    assert harness.settle(plan) == []
    assert harness.scheduler.stats.free_blocks == 8
    harness.output[replacement.id] = []
    harness.run_to_reference(replacement)


def test_settling_a_step_twice_is_refused() -> None:
    harness = Harness()
    harness.add(make_sequence(4))
    plan = harness.schedule()
    harness.settle(plan)
    with pytest.raises(AssertionError, match="not in flight"):
        harness.scheduler.settle(plan, StepResult(plan.step, [SampledTokens((1,))]))


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


def test_time_of_the_first_step_stays_through_preemptions() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(background := make_sequence(40, max_tokens=3, lane="batch"))
    harness.now = 5.0
    harness.step()
    assert background.scheduled_at == 5.0
    harness.add(person := make_sequence(4, max_tokens=1))
    harness.now = 7.0
    harness.run()
    assert (background.num_preemptions, background.scheduled_at, person.scheduled_at) == (1, 5.0, 7.0)


def test_batch_work_is_put_off_only_while_nothing_of_people_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    scheduler = harness.scheduler
    monkeypatch.setattr(scheduler._throttle, "pause_s", lambda now: 0.5)
    harness.add(make_sequence(4, max_tokens=8, lane="batch"))
    assert scheduler.pause_s(0.0) == 0.5
    harness.step()
    assert scheduler.pause_s(0.0) == 0.5
    harness.schedule()
    assert scheduler.pause_s(0.0) == 0.0, "a step is in flight"
    harness.land()
    harness.add(person := make_sequence(4, max_tokens=8))
    assert scheduler.pause_s(0.0) == 0.0, "somebody waits"
    harness.step()
    assert scheduler.pause_s(0.0) == 0.0, "somebody is answered"
    scheduler.abort(person.id)
    harness.run()
    assert scheduler.pause_s(0.0) == 0.5


def test_only_unfinished_sequences_past_their_deadline_expire_once() -> None:
    deadlines = Deadlines()
    early, late, done = (make_sequence(2, deadline=deadline) for deadline in (1.0, 3.0, 1.0))
    for sequence in (early, late, done):
        deadlines.watch(sequence, 3)
    done.status = SequenceStatus.FINISHED
    assert deadlines.pop_expired(0.9) == []
    assert deadlines.pop_expired(1.0) == [early]
    assert deadlines.pop_expired(2.0) == []
    assert deadlines.pop_expired(3.5) == [late]


def test_finished_sequences_with_distant_deadlines_are_swept_out() -> None:
    deadlines = Deadlines()
    for _ in range(1000):
        sequence = make_sequence(2, deadline=1e9)
        deadlines.watch(sequence, 1)
        sequence.status = SequenceStatus.FINISHED
    assert len(deadlines._heap) < 100
