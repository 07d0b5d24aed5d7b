import pytest

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.model_runner import BrokenRunnerError, PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import MediaConfig, SchedulerConfig, StageCost
from gpu_worker.core.step import CompletedStep, SampledTokens, SequenceEvent, StepResult
from gpu_worker.engine.engine import MAX_CONTROL_STEPS, Engine, Rate, StepRates
from gpu_worker.execution.simulated_runner import SimulatedRunner
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.runners import BrokenRunner, PoisonedRunner, make_scheduler

TOKENS = range(10, 20)


def run(engine: Engine) -> list[SequenceEvent]:
    events = []
    while engine.has_work():
        events += engine.step()
    return events


def test_sequences_run_to_their_end() -> None:
    engine = Engine(make_scheduler(), SimulatedRunner(0, TOKENS))
    sequences = [make_sequence(5, max_tokens=7, seed=seed) for seed in range(6)]
    for sequence in sequences:
        engine.add(sequence)
    finishes = [event for event in run(engine) if event.finish]
    assert [event.finish for event in finishes] == ["length"] * 6
    assert all(len(sequence.token_ids) == 12 for sequence in sequences)
    assert (engine.stats.running, engine.stats.free_blocks, engine.stats.is_fatal) == (0, 64, False)
    assert engine.stats.step == 14


def test_sequence_that_fails_alone_ends_alone_and_the_engine_goes_on() -> None:
    hit, next_one = make_sequence(5), make_sequence(5)
    engine = Engine(make_scheduler(max_num_seqs=1), PoisonedRunner({hit.id}))
    engine.add(hit)
    engine.add(next_one)
    assert engine.step() == []
    (event,) = engine.step()
    assert (event.sequence, event.finish, event.error) == (hit, "failed", "RuntimeError: poisoned")
    assert isinstance(engine.last_error, RuntimeError)
    assert [event.finish for event in run(engine) if event.finish] == ["length"]
    assert engine.last_error is None
    assert (engine.stats.num_failed_steps, engine.stats.is_fatal, engine.stats.free_blocks) == (2, False, 64)


@pytest.mark.parametrize("num_poisoned", [1, 2, 7, 8])
def test_poisoned_sequences_end_and_their_neighbours_lose_and_repeat_nothing(num_poisoned: int) -> None:
    sequences = [make_sequence(5, max_tokens=7, seed=seed) for seed in range(8)]
    poisoned = {sequence.id for sequence in sequences[8 - num_poisoned :]}
    runner = PoisonedRunner(poisoned, from_length=7)
    engine = Engine(make_scheduler(max_num_seqs=8, max_num_batched_tokens=64), runner)
    for sequence in sequences:
        engine.add(sequence)
    events = run(engine)
    for sequence in sequences:
        mine = [event for event in events if event.sequence is sequence]
        assert [event.finish for event in mine if event.finish] == ["failed" if sequence.id in poisoned else "length"]
        assert [token for event in mine for token in event.token_ids] == sequence.token_ids[5:]
        assert [event.num_tokens_before for event in mine] == list(range(len(mine)))
    # Halving finds one of eight with two failing steps more, and three that succeed.
    assert num_poisoned > 1 or engine.stats.num_failed_steps == 4
    assert not engine.stats.is_fatal


def test_poisoned_requests_one_after_another_do_not_break_the_engine() -> None:
    sequences = [make_sequence(5) for _ in range(10)]
    engine = Engine(make_scheduler(max_num_seqs=1), PoisonedRunner({sequence.id for sequence in sequences}))
    for sequence in sequences:
        engine.add(sequence)
    assert [event.finish for event in run(engine)] == ["failed"] * 10
    assert (engine.stats.is_fatal, engine.stats.free_blocks) == (False, 64)


@pytest.mark.parametrize("num_sequences", [1, 2, 4])
def test_failure_that_passes_costs_nobody_anything(num_sequences: int) -> None:
    engine = Engine(make_scheduler(), BrokenRunner({2}))
    sequences = [make_sequence(5, max_tokens=7) for _ in range(num_sequences)]
    for sequence in sequences:
        engine.add(sequence)
    assert [event.finish for event in run(engine) if event.finish] == ["length"] * num_sequences
    assert (engine.stats.num_failed_steps, engine.stats.is_fatal) == (1, False)


@pytest.mark.parametrize("num_sequences", [1, 2, 8])
def test_runner_that_computes_nothing_any_more_breaks_the_engine_and_blames_nobody(num_sequences: int) -> None:
    runner = BrokenRunner()
    engine = Engine(make_scheduler(max_num_seqs=8, max_num_batched_tokens=64), runner)
    sequences = [make_sequence(5) for _ in range(num_sequences)]
    for sequence in sequences:
        engine.add(sequence)
    with pytest.raises(BrokenRunnerError, match="device lost"):
        assert run(engine) == []
    assert set(engine.scheduler.sequences) == set(sequences)
    assert all(sequence.num_output_tokens == 0 for sequence in sequences)
    # One step for each halving down to a sequence, which is computed alone at least once more; then the control steps.
    assert runner.num_executions == max(2, num_sequences.bit_length()) + MAX_CONTROL_STEPS


class BlindRunner(SimulatedRunner):
    """Fails to encode an image."""

    def submit(self, plan: StepPlan) -> PendingStep:
        if any(work.digest == b"bad".ljust(32) for work in plan.encodes):
            raise RuntimeError("no pixels")
        return super().submit(plan)


@pytest.mark.parametrize("num_streams", [0, 2])
@pytest.mark.parametrize("budget", [24, 200])
def test_image_that_cannot_be_encoded_ends_its_own_sequence_alone(num_streams: int, budget: int) -> None:
    """Also where other images are encoded by the same steps, and where its sequence computes nothing yet."""
    config = SchedulerConfig(8, 200, 8, budget, 400, media=MediaConfig((StageCost(1.0),) * 3, 64))
    engine = Engine(Scheduler(config), BlindRunner(0, TOKENS))
    streams = [make_sequence(4, max_tokens=60, seed=seed) for seed in range(num_streams)]
    seeing = []
    for name in (b"good", b"bad", b"fine"):
        sequence = make_sequence(22, max_tokens=4)
        sequence.media = (MediaSpan(1, 20, name.ljust(32), 20, num_patches=20),)
        seeing.append(sequence)
    for sequence in (*streams, *seeing):
        engine.add(sequence)
    finishes = {event.sequence.id: event.finish for event in run(engine) if event.finish}
    assert [finishes[sequence.id] for sequence in seeing] == ["length", "failed", "length"]
    assert {finishes[sequence.id] for sequence in streams} <= {"length"}
    assert engine.stats.num_failed_steps <= 3


def test_sequence_aborted_while_a_failed_step_is_computed_again_is_left_out() -> None:
    sequences = [make_sequence(5, max_tokens=7) for _ in range(4)]
    engine = Engine(make_scheduler(max_num_batched_tokens=64), PoisonedRunner({sequences[0].id}))
    for sequence in sequences:
        engine.add(sequence)
    assert engine.step() == []
    engine.abort(sequences[0].id)
    engine.abort(sequences[3].id)
    finishes = {event.sequence.id: event.finish for event in run(engine) if event.finish}
    assert finishes == {sequences[1].id: "length", sequences[2].id: "length"}
    assert engine.stats.free_blocks == 64


def test_result_of_the_wrong_length_is_a_failed_step() -> None:
    class ShortRunner(BrokenRunner):
        def submit(self, plan: StepPlan) -> CompletedStep:
            result = super().submit(plan).outcome
            return CompletedStep(StepResult(plan.step, result.sampled[: 2 if len(plan.rows) > 2 else None]))

    engine = Engine(make_scheduler(), ShortRunner(set()))
    for _ in range(3):
        engine.add(make_sequence(5, max_tokens=3))
    assert engine.step() == []
    assert str(engine.last_error) == "runner answered 2 of 3 sequences"
    assert [event.finish for event in run(engine) if event.finish] == ["length"] * 3


def test_step_without_work_executes_nothing() -> None:
    runner = BrokenRunner(set())
    engine = Engine(make_scheduler(), runner)
    assert engine.step() == []
    assert (engine.stats.step, runner.num_executions) == (0, 0)


def test_deadlines_are_in_the_clock_of_the_engine() -> None:
    now = [100.0]
    engine = Engine(make_scheduler(), SimulatedRunner(0, TOKENS), clock=lambda: now[0])
    engine.add(make_sequence(5, deadline=101.0))
    engine.step()
    now[0] = 101.0
    (event,) = engine.step()
    assert event.finish == "expired"


def test_rates_are_measured_over_busy_steps() -> None:
    now = [0.0]

    def sleep(duration_s: float) -> None:
        now[0] += duration_s

    scheduler = make_scheduler(max_num_seqs=1)
    engine = Engine(scheduler, SimulatedRunner(100, TOKENS, lambda: now[0], sleep, growth=0), clock=lambda: now[0])
    engine.add(make_sequence(64, max_tokens=20))
    engine.step()
    assert engine.stats.prefill_rate == pytest.approx(320)
    assert engine.stats.decode_rate == 0
    run(engine)
    assert engine.stats.decode_rate == pytest.approx(10, rel=0.01)
    now[0] += 1000.0
    assert engine.stats.decode_rate == pytest.approx(10, rel=0.01)


class InvalidRowsRunner(SimulatedRunner):
    """Reports an error for some sequences once they have `from_length` tokens, by default for whatever it computes."""

    def __init__(self, names: set[str] | None = None, from_length: int = 0) -> None:
        super().__init__(0, TOKENS)
        self._names = names
        self._from_length = from_length

    def submit(self, plan: StepPlan) -> CompletedStep:
        step = super().submit(plan).result()
        sampled = [
            SampledTokens(error="no numbers") if self._is_invalid(sequence) else tokens
            for sequence, tokens in zip(self._sequences.of(plan.rows), step.sampled, strict=True)
        ]
        return CompletedStep(StepResult(plan.step, sampled))

    def _is_invalid(self, sequence: BatchSequence) -> bool:
        return self._names is None or (sequence.id in self._names and len(sequence.token_ids) >= self._from_length)


def test_sequence_with_an_error_ends_in_its_step_and_its_neighbours_go_on() -> None:
    bad, sound = make_sequence(5, max_tokens=7), make_sequence(5, max_tokens=7, seed=1)
    engine = Engine(make_scheduler(), InvalidRowsRunner({bad.id}, from_length=8))
    engine.add(bad)
    engine.add(sound)
    events = run(engine)
    assert [(event.finish, event.error) for event in events if event.sequence is bad and event.finish] == [
        ("failed", "no numbers")
    ]
    assert (bad.num_output_tokens, sound.num_output_tokens) == (3, 7)
    assert (engine.stats.num_failed_steps, engine.stats.is_fatal, engine.stats.free_blocks) == (0, False, 64)


def test_what_a_sequence_with_an_error_has_computed_is_not_found_by_others() -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    bad, again, sound = (make_sequence(prompt, max_tokens=4, seed=seed) for seed in range(3))
    engine = Engine(make_scheduler(), InvalidRowsRunner({bad.id}, from_length=len(prompt) + 1))
    engine.add(bad)
    engine.add(make_sequence(3, max_tokens=30))
    while bad.num_output_tokens == 0:
        engine.step()
    run(engine)
    engine.add(again)
    run(engine)
    engine.add(sound)
    run(engine)
    assert again.num_cached_tokens == 0
    assert sound.num_cached_tokens > 0


def test_step_of_errors_alone_blames_no_sequence_of_a_broken_runner() -> None:
    engine = Engine(make_scheduler(), InvalidRowsRunner())
    for seed in range(3):
        engine.add(make_sequence(5, seed=seed))
    with pytest.raises(BrokenRunnerError, match="logits"):
        run(engine)


def test_error_of_a_sequence_that_was_aborted_meanwhile_is_no_failed_step() -> None:
    bad = make_sequence(5, max_tokens=7)
    runner = InvalidRowsRunner({bad.id}, from_length=6)
    runner.max_steps_in_flight = 2
    engine = Engine(make_scheduler(), runner)
    engine.add(bad)
    engine.step()
    engine.step()
    assert (engine.abort(bad.id), engine.num_steps_in_flight) == (bad, 1)
    assert engine.land() == []
    assert engine.stats.num_failed_steps == 0


def test_step_of_errors_alone_ends_all_its_sequences_when_the_runner_computes_others() -> None:
    sequences = [make_sequence(5, seed=seed) for seed in range(3)]
    engine = Engine(make_scheduler(), InvalidRowsRunner({sequence.id for sequence in sequences}))
    for sequence in sequences:
        engine.add(sequence)
    finishes = [(event.finish, event.error) for event in run(engine) if event.finish]
    assert [finish for finish, _ in finishes] == ["failed"] * 3
    assert all(error is not None and "logits" in error for _, error in finishes)
    assert not engine.stats.is_fatal


def _observe(
    rates: StepRates,
    *,
    num_prefilled: int = 0,
    num_generated: int = 0,
    is_full: bool = False,
    is_batch_full: bool = True,
    duration_s: float = 0.1,
) -> None:
    rates.observe(
        num_prefilled=num_prefilled,
        num_generated=num_generated,
        is_full=is_full,
        is_batch_full=is_batch_full,
        duration_s=duration_s,
    )


def test_rate_is_units_per_second_and_forgets() -> None:
    rate = Rate()
    assert rate.value == 0
    for _ in range(100):
        rate.observe(10, 0.1)
    assert rate.value == pytest.approx(100)
    for _ in range(100):
        rate.observe(30, 0.1)
    assert rate.value == pytest.approx(300, rel=0.02)


def test_rate_weighs_steps_by_their_duration() -> None:
    rate = Rate()
    for _ in range(1000):
        rate.observe(100, 0.001)
        rate.observe(0, 0.099)
    assert rate.value == pytest.approx(1000, rel=0.05)


def test_short_prompts_alone_say_nothing_about_the_prefill_rate() -> None:
    rates = StepRates()
    _observe(rates, num_prefilled=10, num_generated=5)
    assert (rates.prefill.value, rates.decode.value) == (0, pytest.approx(50))


def test_small_batches_alone_say_nothing_about_the_decode_rate() -> None:
    rates = StepRates()
    _observe(rates, num_generated=5, is_batch_full=False)
    assert rates.decode.value == 0


def test_step_that_ran_out_of_prompts_never_lowers_the_prefill_rate() -> None:
    rates = StepRates()
    _observe(rates, num_prefilled=1000, is_full=True)
    _observe(rates, num_prefilled=10)
    assert rates.prefill.value == pytest.approx(10_000)
    _observe(rates, num_prefilled=2000)
    assert rates.prefill.value > 14_000


def test_steps_without_decodes_do_not_lower_the_decode_rate() -> None:
    rates = StepRates()
    _observe(rates, num_generated=10)
    _observe(rates, num_prefilled=500, is_full=True, duration_s=0.5)
    assert rates.decode.value == pytest.approx(100)


def test_small_batch_never_lowers_the_decode_rate() -> None:
    rates = StepRates()
    _observe(rates, num_generated=100)
    for _ in range(50):
        _observe(rates, num_generated=1, is_batch_full=False)
    assert rates.decode.value == pytest.approx(1000)
    for _ in range(50):
        _observe(rates, num_generated=50)
    assert rates.decode.value == pytest.approx(500, rel=0.1)
