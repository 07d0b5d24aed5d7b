from __future__ import annotations

import random

import pytest

from ops.simulation.fit import FirstToken, Gap, fit, spread
from ops.simulation.step_time import Chunk, LinearTimes

TIMES = LinearTimes(0.004, 3e-4, 5e-5, 2e-7, 1e-9)
LATENCY_S = 0.003
PROMPTS: tuple[tuple[Chunk, ...], ...] = (((0, 20),), ((0, 400),), ((0, 512), (512, 300)), ((0, 512), (512, 512)))


def measurements(times: LinearTimes, noise: float = 0.0) -> list[Gap | FirstToken]:
    draw = random.Random(1)
    found: list[Gap | FirstToken] = []
    for num_decodes in (1, 2, 4, 8, 16):
        for each in (50, 200, 800):
            seconds = times.seconds(num_decodes, num_decodes * each, ())
            found.append(Gap(seconds * draw.lognormvariate(0, noise), num_decodes, num_decodes * each))
    for chunks in PROMPTS:
        seconds = LATENCY_S + sum(times.seconds(0, 0, [chunk]) for chunk in chunks)
        found.append(FirstToken(seconds * draw.lognormvariate(0, noise), chunks))
    return found


def test_times_that_measurements_were_made_of_are_found() -> None:
    found = fit(measurements(TIMES))
    assert found.latency_s == pytest.approx(LATENCY_S, rel=1e-3)
    for part in ("fixed_s", "sequence_s", "token_s", "context_s", "pair_s"):
        assert getattr(found.times, part) == pytest.approx(getattr(TIMES, part), rel=1e-3)


def test_noise_changes_what_steps_take_little() -> None:
    found = fit(measurements(TIMES, 0.05)).times
    for num_decodes in (1, 12):
        expected = TIMES.seconds(num_decodes, 300 * num_decodes, ())
        assert found.seconds(num_decodes, 300 * num_decodes, ()) == pytest.approx(expected, rel=0.1)


def test_parts_are_never_negative() -> None:
    shrinking = [Gap(0.01 - 1e-4 * count, count, 100 * count) for count in (1, 4, 16)]
    firsts = [FirstToken(0.02, chunks) for chunks in PROMPTS]
    found = fit([*shrinking, *firsts])
    assert min(found.latency_s, *(getattr(found.times, part) for part in LinearTimes.__slots__)) >= 0
    assert found.times.seconds(4, 400, ()) == pytest.approx(0.0095, rel=0.1)


def test_spread_has_the_quantiles_of_measured_over_predicted() -> None:
    gaps = [Gap(0.01 * (1 + place / 1000), 1, 0) for place in range(1001)]
    ratios = spread(gaps, LinearTimes(0.01))
    assert (ratios[0], ratios[50], ratios[-1]) == (1.0, 1.5, 2.0)
    assert list(ratios) == sorted(ratios)


def test_parts_that_no_measurement_has_are_zero() -> None:
    gaps = [Gap(0.01 + 0.001 * batch, batch, 100 * batch) for batch in (1, 2, 4)]
    found = fit(gaps)
    assert (found.latency_s, found.times.token_s, found.times.pair_s) == (0.0, 0.0, 0.0)
    assert found.times.fixed_s == pytest.approx(0.01)
