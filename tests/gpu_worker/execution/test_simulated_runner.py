import pytest

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.simulated_runner import SimulatedRunner
from tests.clock import Clock
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.plans import plan_of

TOKENS = range(100, 200)


def steps_of(*sequences: Sequence, start: int | None = None, samples: bool = True) -> StepPlan:
    items = [ScheduledSequence(s, s.num_tokens - 1 if start is None else start, 1, samples) for s in sequences]
    return plan_of(items)


def generate(runner: SimulatedRunner, sequence: Sequence, count: int) -> list[int]:
    for _ in range(count):
        sequence.token_ids.extend(runner.submit(steps_of(sequence)).result().sampled[0].token_ids)
    return sequence.token_ids[sequence.num_prompt_tokens :]


def test_tokens_are_allowed_ones_and_depend_on_the_seed() -> None:
    runner = SimulatedRunner(0, TOKENS)
    outputs = [generate(runner, make_sequence(3, seed=seed), 200) for seed in (0, 1, -(2**63))]
    assert all(token in TOKENS for output in outputs for token in output)
    assert all(len(set(output)) > 60 for output in outputs)
    assert outputs[0] != outputs[1] != outputs[2]


def test_moved_sequence_continues_with_the_same_tokens_in_any_batch() -> None:
    whole = generate(SimulatedRunner(0, TOKENS), make_sequence(3, seed=7), 50)
    resumed, other = make_sequence(9, emitted=whole[:20], seed=7), make_sequence(2, seed=8)
    runner = SimulatedRunner(0, TOKENS)
    for _ in range(30):
        result = runner.submit(steps_of(other, resumed)).result()
        resumed.token_ids.extend(result.sampled[1].token_ids)
    assert resumed.token_ids[9:] == whole


def test_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    runner = SimulatedRunner(0, TOKENS)
    result = runner.submit(steps_of(make_sequence(9), start=0, samples=False)).result()
    assert result.sampled[0].token_ids == ()


def test_logprobs_are_given_when_asked_for() -> None:
    runner = SimulatedRunner(0, TOKENS)
    sequence = make_sequence(5, logprobs=2, prompt_logprobs=0)
    plan = plan_of([ScheduledSequence(sequence, 2, 3, True)])
    (sampled,) = runner.submit(plan).result().sampled
    assert [entry.token_id for entry in sampled.logprobs] == list(sampled.token_ids)
    assert len(sampled.logprobs[0].top) == 2
    assert [entry.token_id for entry in sampled.prompt_logprobs] == sequence.token_ids[3:5]


def test_step_rate_is_exact_although_every_sleep_is_too_long() -> None:
    clock = Clock(50.0, 0.0004)
    runner = SimulatedRunner(1.5, TOKENS, clock, clock.sleep)
    started = clock.now
    for _ in range(1000):
        runner.submit(steps_of())
        clock.now += 0.0003
    assert clock.now - started == pytest.approx(1.5, abs=0.001)


def test_step_after_a_pause_takes_its_full_time_and_does_not_catch_up() -> None:
    clock = Clock(50.0)
    runner = SimulatedRunner(10, TOKENS, clock, clock.sleep)
    runner.submit(steps_of())
    for _ in range(2):
        clock.now += 5.0
        before = clock.now
        runner.submit(steps_of())
        assert clock.now - before == pytest.approx(0.010)


@pytest.mark.parametrize(("growth", "expected_s"), [(0.0, 0.010), (0.005, 0.01275), (0.1, 0.065)])
def test_step_grows_with_sequences_and_prompt_tokens(growth: float, expected_s: float) -> None:
    clock = Clock(50.0)
    runner = SimulatedRunner(10, TOKENS, clock, clock.sleep, growth=growth)
    decodes = [ScheduledSequence(make_sequence(3), 2, 1, True) for _ in range(16)]
    runner.submit(plan_of([*decodes, ScheduledSequence(make_sequence(40), 0, 40, True)]))
    assert clock.now - 50.0 == pytest.approx(expected_s)


def test_zero_step_time_never_sleeps() -> None:
    clock = Clock(50.0)
    runner = SimulatedRunner(0, TOKENS, clock, clock.sleep)
    runner.submit(steps_of(make_sequence(3)))
    assert clock.now == 50.0
