import math

import pytest

from gpu_worker.core.batch_throttle import MIN_CHUNK_TOKENS, BatchAllowance, BatchThrottle
from gpu_worker.core.step import ScheduledSequence, ScheduledStep
from gpu_worker.core.step_time import StepTimeModel
from shared.messages import Lane
from tests.gpu_worker.core.learned_times import model_of
from tests.gpu_worker.core.sequences import make_sequence


def num_decodes(throttle: BatchThrottle, now: float, num_interactive: int) -> int:
    """Batch decodes of a step that is planned with so many people, when any number is to be had."""
    count = throttle.allowance(now, num_interactive, 0).take_decodes(1000)
    throttle.planned(now, num_interactive, 0, count)
    return count


def test_nothing_is_limited_before_the_first_step_was_measured() -> None:
    throttle = BatchThrottle(StepTimeModel(), 0.05)
    allowance = throttle.allowance(0.0, 3, 0)
    assert allowance.take_decodes(1000) == 1000
    assert allowance.take_chunk(10_000) == 10_000
    assert throttle.max_batch_seqs(256) == 256


def test_steps_of_people_become_longer_by_the_slowdown_at_most(gpu: StepTimeModel) -> None:
    for people in (1, 8, 64):
        count = num_decodes(BatchThrottle(gpu, 0.05), 0.0, people)
        alone_s = gpu.predict(people, 0, 0)
        assert gpu.predict(people, count, 0) <= 1.05 * alone_s < gpu.predict(people, count + 1, 0)
        assert count >= 9


def test_one_step_in_250_goes_on_where_no_step_of_people_has_room(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    counts = [num_decodes(throttle, float(step), 2) for step in range(1255)]
    long_steps = [step for step, count in enumerate(counts) if count]
    assert long_steps == [250, 501, 752, 1003, 1254]
    assert {counts[step] for step in long_steps} == {math.floor(3 * cpu.predict(2, 0, 0) / cpu.batch_sequence_s)}
    assert throttle.max_batch_seqs(256) == math.ceil(3 * cpu.predict(1, 0, 0) / cpu.batch_sequence_s)


def test_long_steps_are_longer_and_more_beside_one_person_who_has_been_alone_for_a_thousand_steps(
    cpu: StepTimeModel,
) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    frugal = BatchThrottle(cpu, 0.03)
    counts = [num_decodes(throttle, float(step), 1) for step in range(1303)]
    assert [step for step, count in enumerate(counts) if count] == [250, 501, 752, 1000, 1151, 1302]
    assert counts[1000] == counts[1302] == math.floor(6 * cpu.predict(1, 0, 0) / cpu.batch_sequence_s)
    assert throttle.max_batch_seqs(256) == pytest.approx(counts[1000], abs=1)
    assert [step for step in range(2000) if num_decodes(frugal, float(step), 1)][-2:] == [1505, 1756]
    # Somebody else came.
    throttle.planned(1303.0, 2, 0, 0)
    assert throttle.max_batch_seqs(256) == pytest.approx(counts[250], abs=1)
    assert [step for step in range(300) if num_decodes(throttle, 1304.0, 1)] == [249]


def test_one_step_in_200_goes_on_while_a_batch_sequence_is_on_trial(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    long_steps = []
    for step in range(1000):
        count = throttle.allowance(0.0, 1, 0, is_trial=True).take_decodes(1)
        throttle.planned(0.0, 1, 0, count)
        long_steps += [step] * count
    assert long_steps == [200, 401, 602, 803]


def test_step_with_a_prompt_of_people_is_never_the_long_one(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    for _ in range(1100):
        assert throttle.allowance(0.0, 2, 20).take_decodes(1000) <= 0.05 * cpu.predict(2, 0, 20) / cpu.batch_sequence_s
        throttle.planned(0.0, 2, 20, 0)
    assert num_decodes(throttle, 0.0, 2) > 5


def test_long_step_is_bounded_in_seconds_too() -> None:
    slow = model_of(0.1, 0.01, 0.001)
    throttle = BatchThrottle(slow, 0.0)
    counts = [num_decodes(throttle, 0.0, 1) for _ in range(1001)]
    assert counts[-1] * slow.batch_sequence_s <= slow.predict(1, 0, 0)


def test_one_step_of_people_in_65_goes_without_batch_work(gpu: StepTimeModel) -> None:
    throttle = BatchThrottle(gpu, 0.05)
    counts = [num_decodes(throttle, 0.0, 8) for _ in range(200)]
    assert [step for step, count in enumerate(counts) if not count] == [64, 129, 194]


def plan_of(lane: Lane) -> ScheduledStep:
    share = ScheduledSequence(make_sequence(4, lane=lane), 4, 1, True)
    return ScheduledStep(1, [share], 1, num_batch=int(lane == "batch"))


def note_gap(throttle: BatchThrottle, now: float, seconds: float) -> None:
    """Let people be away for so long until now."""
    throttle.landed(plan_of("interactive"), 0.001, now - seconds)
    throttle.planned(now, 1, 0, 0)


@pytest.mark.parametrize(
    ("gap_s", "quiet_s"), [(0.0, 0.25), (0.005, 0.25), (0.2, 0.5), (1.0, 2.5), (4.0, 10.0), (20.0, 0.25)]
)
def test_people_have_left_when_they_are_away_for_much_longer_than_lately(
    cpu: StepTimeModel, gap_s: float, quiet_s: float
) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    note_gap(throttle, 100.0, gap_s)
    throttle.landed(plan_of("interactive"), 0.001, 100.0)
    assert throttle.pause_s(100.0 + 0.01 * quiet_s) > 0
    assert throttle.pause_s(100.0 + 1.01 * quiet_s) == 0
    assert num_decodes(throttle, 100.0 + 0.99 * quiet_s, 0) == 1
    assert num_decodes(throttle, 100.0 + 1.01 * quiet_s, 0) > 50


def test_longest_gap_is_forgotten_by_and_by(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    for now in range(100):
        note_gap(throttle, 10.0 * now, 4.0 if now == 0 else 0.1)
    throttle.landed(plan_of("interactive"), 0.001, 2000.0)
    assert throttle.pause_s(2000.7) == 0


def test_batch_steps_are_short_for_ten_seconds_after_people(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    note_gap(throttle, 99.0, 5.0)
    throttle.planned(100.0, 1, 20, 0)
    assert num_decodes(throttle, 109.9, 0) == 1
    assert throttle.allowance(109.9, 0, 0).is_throttled
    assert num_decodes(throttle, 110.1, 0) > 50
    assert not throttle.allowance(110.1, 0, 0).is_throttled


def test_people_whose_first_token_takes_long_allow_longer_batch_steps(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    note_gap(throttle, 0.0, 5.0)
    throttle.planned(0.0, 1, 500, 0)
    count = num_decodes(throttle, 1.0, 0)
    assert cpu.predict(0, count, 0) <= 0.2 * cpu.predict(1, 0, 500) < cpu.predict(0, count + 1, 0)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_step_without_people_reaches_95_percent_of_the_highest_throughput(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model: StepTimeModel = request.getfixturevalue(kind)
    throttle = BatchThrottle(model, 0.05)
    count = throttle.allowance(0.0, 0, 0).take_decodes(100_000)
    assert count / model.predict(0, count, 0) == pytest.approx(0.95 / model.batch_sequence_s, rel=0.01)
    assert throttle.max_batch_seqs(100_000) == pytest.approx(count, abs=1)


def test_step_without_people_holds_several_sequences_whatever_the_fixed_part_is_taken_for() -> None:
    model = model_of(1e-6, 1e-3, 1e-4)
    throttle = BatchThrottle(model, 0.05)
    assert 3 <= throttle.allowance(0.0, 0, 0).take_decodes(1000) <= 5
    assert throttle.max_batch_seqs(256) >= 3


def test_share_of_time_that_batch_steps_get_grows_with_the_time_since_people(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    assert throttle.pause_s(100.0) == 0.0
    note_gap(throttle, 100.0, 5.0)
    throttle.landed(plan_of("interactive"), 0.001, 100.0)
    now, step_s = 100.0, cpu.predict(0, 1, 0)
    computed_s: dict[int, float] = dict.fromkeys(range(11), 0.0)
    while now < 110.5:
        if pause_s := throttle.pause_s(now):
            assert pause_s <= 1.0
            now += pause_s
            continue
        now += step_s
        computed_s[int(now) - 100] += step_s
        throttle.landed(plan_of("batch"), step_s, now)
    assert [computed_s[second] for second in range(10)] == pytest.approx(
        [0.05 + 0.1 * second for second in range(10)], abs=2 * step_s
    )
    throttle.landed(plan_of("interactive"), 0.001, now)
    assert throttle.pause_s(now) == pytest.approx(math.sqrt(20 * step_s), rel=0.01)


def test_pause_is_bounded_however_long_a_step_takes() -> None:
    throttle = BatchThrottle(model_of(2.0, 0.2, 0.05), 0.05)
    note_gap(throttle, 98.0, 5.0)
    throttle.landed(plan_of("interactive"), 2.0, 100.0)
    assert throttle.pause_s(100.0) == 1.0


def test_slowdown_of_one_holds_nothing_back(cpu: StepTimeModel) -> None:
    for slowdown, is_unlimited in ((1.0, True), (0.99, False)):
        throttle = BatchThrottle(cpu, slowdown)
        throttle.landed(plan_of("interactive"), 0.001, 5.0)
        assert (num_decodes(throttle, 5.0, 1) == 1000) is is_unlimited
        assert (num_decodes(throttle, 5.0, 0) == 1000) is is_unlimited
        assert (throttle.pause_s(5.0) == 0.0) is is_unlimited
        assert (throttle.max_batch_seqs(1000) == 1000) is is_unlimited


def test_long_steps_come_early_and_ever_more_rarely_until_the_model_is_sure() -> None:
    model = StepTimeModel()
    model.observe(1, 0, 0, 1e-3)
    throttle = BatchThrottle(model, 0.05)
    counts = [num_decodes(throttle, float(step), 1) for step in range(800)]
    assert [step for step, count in enumerate(counts) if count] == [8, 25, 58, 123, 252, 503, 754]


def test_long_step_that_takes_much_less_than_was_expected_is_followed_by_another_soon(cpu: StepTimeModel) -> None:
    throttle = BatchThrottle(cpu, 0.05)
    alone_s = cpu.predict(1, 0, 0)
    items = [ScheduledSequence(make_sequence(4), 4, 1, True) for _ in range(11)]
    plan = ScheduledStep(1, items, 11, num_batch=10)

    def until_the_next() -> int:
        return next(step for step in range(2000) if num_decodes(throttle, 0.0, 1))

    assert until_the_next() == 250
    throttle.landed(plan, cpu.predict(1, 10, 0), 0.0)
    assert until_the_next() == 250
    throttle.landed(plan, 1.05 * alone_s, 0.0)
    assert until_the_next() == 8
    throttle.landed(plan, cpu.predict(1, 10, 0), 0.0)
    assert until_the_next() == 250


def test_sequence_that_takes_twice_the_slowdown_has_every_second_step() -> None:
    model = model_of(0.9e-3, 0.08e-3, 0.02e-3)
    throttle = BatchThrottle(model, 0.05)
    counts = [num_decodes(throttle, 0.0, 1) for _ in range(10)]
    assert counts == [0, 1] * 5
    assert throttle.allowance(0.0, 1, 100).take_decodes(1) in (0, 1)
    # Three times as much has none but the long steps.
    dear = BatchThrottle(model_of(0.9e-3, 0.15e-3, 0.02e-3), 0.05)
    assert not any(num_decodes(dear, 0.0, 1) for _ in range(100))


def test_one_step_in_1000_is_long_where_other_steps_have_room_too(gpu: StepTimeModel) -> None:
    throttle = BatchThrottle(gpu, 0.05)
    counts = [num_decodes(throttle, 0.0, 8) for _ in range(2100)]
    usual = max(counts[:999])
    assert [step for step, count in enumerate(counts) if count > 3 * usual] == [1000, 2001]


def test_chunk_shrinks_to_what_is_left_but_not_below_what_is_worth_a_step(gpu: StepTimeModel) -> None:
    def allowance(seconds: float, *, is_first_free: bool = False) -> BatchAllowance:
        return BatchAllowance(seconds, gpu, is_first_free=is_first_free)

    enough = gpu.batch_sequence_s + 100 * gpu.token_s
    assert allowance(enough).take_chunk(1000) in (100, 101)
    assert allowance(enough).take_chunk(50) == 50
    assert allowance(gpu.batch_sequence_s + 3 * gpu.token_s).take_chunk(1000) == 0
    assert allowance(gpu.batch_sequence_s + 3 * gpu.token_s).take_chunk(4) in (0, 4)
    assert allowance(0.0, is_first_free=True).take_chunk(1000) == MIN_CHUNK_TOKENS
    assert allowance(-1.0, is_first_free=True).take_chunk(5) == 5


def test_one_sequence_at_most_is_free(cpu: StepTimeModel) -> None:
    allowance = BatchAllowance(-1.0, cpu, is_first_free=True)
    assert allowance.has_room
    assert not allowance.is_spent
    assert allowance.take_decodes(8) == 1
    assert not allowance.has_room
    assert allowance.is_spent
    assert (allowance.take_decodes(7), allowance.take_chunk(20)) == (0, 0)


def test_whole_prompt_is_taken_if_all_of_it_fits_or_as_the_first_that_is_free(gpu: StepTimeModel) -> None:
    enough = gpu.batch_sequence_s + 100 * gpu.token_s
    assert BatchAllowance(enough, gpu).take_whole(100)
    assert not BatchAllowance(enough, gpu).take_whole(103)
    allowance = BatchAllowance(0.0, gpu, is_first_free=True)
    assert allowance.take_whole(1000)
    assert not allowance.take_whole(1)


def test_beside_people_a_chunk_may_be_a_single_token(cpu: StepTimeModel) -> None:
    def allowance() -> BatchAllowance:
        return BatchAllowance(cpu.batch_sequence_s + 2.5 * cpu.token_s, cpu, is_throttled=True)

    assert allowance().has_room
    assert allowance().take_chunk(1000) == 3
    assert BatchAllowance(0.9 * cpu.batch_sequence_s, cpu, is_throttled=True).take_chunk(1000) == 0
    # Between two visits a step is worth its fixed part.
    assert BatchAllowance(-1.0, cpu, is_first_free=True, is_throttled=True).take_chunk(1000) == MIN_CHUNK_TOKENS
