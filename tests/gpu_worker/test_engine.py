import pytest

from gpu_worker.core.step import CompletedStep, SampledTokens, SequenceEvent, StepPlan, StepResult
from gpu_worker.engine import MAX_CONSECUTIVE_FAILURES, Engine
from gpu_worker.execution.simulated_runner import SimulatedRunner
from shared.errors import PromptTooLongError
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.runners import BrokenRunner, make_scheduler

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


def test_runner_exception_fails_that_step_and_the_engine_goes_on() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), BrokenRunner({2}))
    hit, next_one = make_sequence(5), make_sequence(5)
    engine.add(hit)
    engine.add(next_one)
    engine.step()
    (event,) = engine.step()
    assert (event.sequence, event.finish, event.error) == (hit, "failed", "RuntimeError: device lost")
    assert isinstance(engine.last_error, RuntimeError)
    assert [event.finish for event in run(engine) if event.finish] == ["length"]
    assert engine.last_error is None
    assert (engine.stats.num_failed_steps, engine.stats.is_fatal, engine.stats.free_blocks) == (1, False, 64)


def test_runner_that_keeps_failing_is_fatal() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), BrokenRunner())
    for number in range(MAX_CONSECUTIVE_FAILURES):
        assert not engine.stats.is_fatal, number
        engine.add(make_sequence(5))
        engine.step()
    assert engine.stats.is_fatal


def test_success_between_failures_is_not_fatal() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1), BrokenRunner({1, 2, 4, 5}))
    for _ in range(5):
        engine.add(make_sequence(5, max_tokens=1))
        engine.step()
    assert (engine.stats.num_failed_steps, engine.stats.is_fatal) == (4, False)


def test_result_of_the_wrong_length_is_a_failed_step() -> None:
    class ShortRunner:
        max_steps_in_flight = 1

        def submit(self, plan: StepPlan) -> CompletedStep:
            return CompletedStep(StepResult(plan.step, [SampledTokens((1,))] * (len(plan.scheduled) - 1)))

    engine = Engine(make_scheduler(), ShortRunner())
    engine.add(make_sequence(5))
    (event,) = engine.step()
    assert (event.finish, event.error) == ("failed", "RuntimeError: runner answered 0 of 1 sequences")


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


def test_prompt_too_long_is_refused() -> None:
    engine = Engine(make_scheduler(), SimulatedRunner(0, TOKENS))
    with pytest.raises(PromptTooLongError):
        engine.add(make_sequence(200))
    with pytest.raises(PromptTooLongError):
        engine.validate(make_sequence(200))


def test_rates_are_measured_over_busy_steps() -> None:
    now = [0.0]

    def sleep(duration_s: float) -> None:
        now[0] += duration_s

    scheduler = make_scheduler(max_num_seqs=1)
    engine = Engine(scheduler, SimulatedRunner(100, TOKENS, lambda: now[0], sleep), clock=lambda: now[0])
    engine.add(make_sequence(64, max_tokens=20))
    engine.step()
    assert engine.stats.prefill_rate == pytest.approx(320)
    assert engine.stats.decode_rate == 0
    run(engine)
    assert engine.stats.decode_rate == pytest.approx(10, rel=0.01)
    now[0] += 1000.0
    assert engine.stats.decode_rate == pytest.approx(10, rel=0.01)
