from __future__ import annotations

import random

import pytest

from ops.simulation.fit import MeasuredStep, fit, fit_host
from ops.simulation.step_time import HostTimes, LinearTimes, StepTimes, StepWork

TIMES = StepTimes(LinearTimes(0.004, 3e-4, 5e-5, 2e-7, 1e-9, 3), HostTimes(1e-4, 2e-5, 4e-4), cold_s=2e-3)
WORKS = [StepWork(batch, batch * context) for batch in (1, 2, 4, 8, 16) for context in (50, 200, 800)] + [
    StepWork(0, 0, [(0, 20)]),
    StepWork(3, 400, [(0, 400)]),
    StepWork(0, 0, [(512, 300), (0, 40)]),
    StepWork(8, 900, [(512, 500)]),
    *(StepWork(2, 200, coldness=coldness) for coldness in (1.0, 0.5, 0.25)),
]


def measured(works: list[StepWork], noise: float = 0.0, times: StepTimes = TIMES) -> list[MeasuredStep]:
    draw = random.Random(1)
    found = []
    for work in works:
        device_s, whole_s = times.seconds(work)
        factor = draw.lognormvariate(0, noise)
        found.append(MeasuredStep(work, device_s * factor, (whole_s - device_s) * factor))
    return found


def test_times_that_steps_were_made_of_are_found() -> None:
    found = fit(measured(WORKS))
    assert isinstance(found.device, LinearTimes)
    for part in LinearTimes.__slots__:
        assert getattr(found.device, part) == pytest.approx(getattr(TIMES.device, part), rel=1e-3)
    for part in HostTimes.__slots__:
        assert getattr(found.host, part) == pytest.approx(getattr(TIMES.host, part), rel=1e-3)
    assert found.cold_s == pytest.approx(TIMES.cold_s, rel=1e-3)


def test_noise_and_delayed_steps_change_what_others_take_little() -> None:
    steps = measured(WORKS * 20, 0.05)
    steps[::25] = [step._replace(device_s=step.device_s + 0.1) for step in steps[::25]]
    found = fit(steps)
    for work in (StepWork(1, 300), StepWork(12, 3600), StepWork(0, 0, [(0, 250)]), StepWork(1, 300, coldness=1.0)):
        assert found.seconds(work)[1] == pytest.approx(TIMES.seconds(work)[1], rel=0.05)


def test_parts_are_never_negative() -> None:
    shrinking = [MeasuredStep(StepWork(batch, 100 * batch), 0.01 - 1e-4 * batch, 0.0) for batch in (1, 4, 16)]
    found = fit(shrinking)
    assert isinstance(found.device, LinearTimes)
    assert min(getattr(found.device, part) for part in LinearTimes.__slots__) >= 0
    assert found.seconds(StepWork(4, 400))[0] == pytest.approx(0.0095, rel=0.1)


def test_parts_that_no_step_has_are_zero() -> None:
    found = fit([MeasuredStep(StepWork(batch, 0), 0.01 + 0.001 * batch, 0.0) for batch in (1, 2, 4)])
    assert isinstance(found.device, LinearTimes)
    assert (found.device.context_s, found.device.pair_s, found.cold_s, found.host.prompt_s) == (0.0, 0.0, 0.0, 0.0)
    assert found.device.fixed_s == pytest.approx(0.01)
    assert found.seconds(StepWork(8, 0))[0] == pytest.approx(0.018)


def test_steps_with_and_without_prompts_have_a_spread_of_their_own() -> None:
    decodes = [MeasuredStep(StepWork(1, 0), 0.01 * (1 + (place - 500) / 1000), 0.0) for place in range(1001)]
    prompts = [MeasuredStep(StepWork(0, 0, [(0, 100)]), 0.05, 0.0)] * 20
    spread = fit(decodes + prompts).spread
    assert (spread.decodes[0], spread.decodes[50], spread.decodes[-1]) == pytest.approx((0.5, 1.0, 1.5), rel=0.02)
    assert list(spread.decodes) == sorted(spread.decodes)
    assert spread.prompts == pytest.approx((1.0,) * 101, rel=0.02)


def test_host_time_has_parts_for_the_step_each_sequence_and_prompts() -> None:
    found = fit_host([(1, False, 0.003), (2, False, 0.004), (8, False, 0.01), (2, True, 0.007)])
    assert (found.step_s, found.sequence_s, found.prompt_s) == pytest.approx((0.002, 0.001, 0.003))


def test_caches_are_cold_behind_a_prompt_and_warm_up_by_half_each_step() -> None:
    works, coldness = [], 0.0
    for chunks in ([], [(0, 64)], [], [], [(0, 1)], [(512, 400), (0, 100)], []):
        works.append(StepWork(1, 10, chunks, coldness))
        coldness = works[-1].coldness_after
    assert [work.coldness for work in works] == [0.0, 0.0, 0.5, 0.25, 0.125, 0.0625, 1.0]
    # Nothing is left of it for ever.
    assert StepWork(1, 10, coldness=0.01).coldness_after == 0.0
