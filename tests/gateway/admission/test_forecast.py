"""Predictions of single terms, with numbers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.admission.forecast import Experience, forecast
from gateway.config import GatewayConfig
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation, Prompt
from shared.pooling import Pooling
from shared.sampling import Sampling

CONFIG = GatewayConfig(interactive_ttft_slo_s=10.0, max_queued_requests=20, max_queued_tokens=1_000)


def load(**changes: Any) -> FleetLoad:
    values: dict[str, Any] = {
        "model": "m",
        "num_workers": 1,
        "running": 4,
        "queued_requests": 0,
        "queued_tokens": 0,
        "prefill_rate": 100.0,
        "decode_rate": 64.0,
        "free_blocks": 60,
        "total_blocks": 100,
        "block_size": 16,
        "max_model_len": 1_000,
        "free_slots": 4,
    }
    return FleetLoad(**values | changes)


def asked(*estimates: int, n: int = 1, **fields: Any) -> Generation:
    prompts = tuple(Prompt(estimate, text="x") for estimate in estimates)
    return Generation("completion", "m", prompts, n, Sampling(), deterministic=False, **fields)


EXPERIENCE = Experience(tokens_per_estimate=2.0, output_tokens=128.0)


def test_own_time_is_that_of_all_prompts_as_they_turn_out() -> None:
    found = forecast(load(), asked(50, 100), EXPERIENCE, CONFIG)
    assert (found.wait_s, found.own_s) == (0.0, 3.0)
    # A sequence leaves every two seconds: two prompts are four seconds of the fleet's time.
    assert found.cost_s == 4.0
    assert forecast(load(), asked(50, n=3), EXPERIENCE, CONFIG).cost_s == 6.0
    assert forecast(load(), asked(500), EXPERIENCE, CONFIG).cost_s == 10.0
    pooled = asked(50, pooling=Pooling(task="embed"))
    assert forecast(load(), pooled, EXPERIENCE, CONFIG).cost_s == 1.0


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        ({}, 0.0),
        ({"queued_requests": 3, "queued_tokens": 200}, 2.0),
        # One slot is missing, then two; a sequence leaves every two seconds.
        ({"queued_requests": 4, "queued_tokens": 200}, 2.0 + 2.0),
        ({"queued_requests": 5, "queued_tokens": 200}, 2.0 + 4.0),
        ({"queued_requests": 5, "queued_tokens": 200, "running": 0}, 2.0 + 4.0),
        ({"running": 0, "free_blocks": 0}, 0.0),
        # Each running sequence has ten blocks; 160 tokens and 160 of its own need twenty, of which five are there.
        ({"queued_requests": 1, "queued_tokens": 160, "free_blocks": 5, "total_blocks": 45}, 1.6 + 3.0),
        ({"free_blocks": 10, "total_blocks": 12}, 0.0),
        ({"free_blocks": 5, "total_blocks": 6}, 10.0),
        ({"decode_rate": 0.0, "free_slots": 0}, 0.0),
        ({"prefill_rate": 0.0, "queued_requests": 4, "queued_tokens": 200}, 2.0),
    ],
)
def test_wait_is_for_the_prompts_ahead_and_for_what_others_hold(changes: dict[str, Any], wait_s: float) -> None:
    assert forecast(load(**changes), asked(80), EXPERIENCE, CONFIG).wait_s == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("changes", "n", "wait_s"),
    [
        ({}, 4, 0.0),
        # Four slots are free; of seven sequences three wait for one that leaves every two seconds.
        ({}, 7, 6.0),
        ({"queued_requests": 2, "queued_tokens": 0}, 7, 10.0),
        # The fleet has eight slots: more sequences than that wait for each other and not for those of others.
        ({}, 128, 8.0),
        ({"running": 0, "free_slots": 8}, 128, 0.0),
        ({"running": 8, "free_slots": 0}, 1, 2.0),
    ],
)
def test_wait_is_until_the_last_sequence_begins_and_the_first_may_begin_before(
    changes: dict[str, Any], n: int, wait_s: float
) -> None:
    found = forecast(load(**changes), asked(8, n=n), EXPERIENCE, CONFIG)
    assert found.wait_s == pytest.approx(wait_s)
    assert found.first_wait_s == forecast(load(**changes), asked(8), EXPERIENCE, CONFIG).wait_s
    # What is computed at once does not hold slots.
    pooled = asked(8, n=n, pooling=Pooling(task="embed"))
    assert forecast(load(**changes), pooled, EXPERIENCE, CONFIG).wait_s == found.first_wait_s


def test_prompt_counts_no_more_than_a_context_holds() -> None:
    assert forecast(load(longest_model_len=100), asked(500), EXPERIENCE, CONFIG).own_s == 1.0


@pytest.mark.parametrize(
    ("changes", "reason", "seconds", "is_exceeded"),
    [
        # An idle fleet has the bound of time alone: 1.6 s of its own against ten.
        ({}, "overloaded", 1.6 - 10.0, False),
        ({"queued_requests": 18, "free_slots": 30}, "queue_full", -2.0, False),
        # One request too many: it leaves in two seconds; the time is long exceeded too.
        ({"queued_requests": 20, "free_slots": 30}, "queue_full", 2.0, True),
        ({"queued_requests": 1, "queued_tokens": 840}, "overloaded", 8.4 + 1.6 - 10.0, False),
        ({"queued_requests": 1, "queued_tokens": 841}, "queue_full", 0.01, True),
    ],
)
def test_bound_that_is_exceeded_or_nearest_is_told(
    changes: dict[str, Any], reason: str, seconds: float, is_exceeded: bool
) -> None:
    excess = forecast(load(free_blocks=100, **changes), asked(80), EXPERIENCE, CONFIG).excess
    assert (excess.reason, excess.is_exceeded) == (reason, is_exceeded)
    assert excess.seconds == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(("timeout_s", "seconds", "is_elastic"), [(None, -5.0, True), (8.0, 2.0, False)])
def test_own_deadline_takes_the_place_of_the_objective(
    timeout_s: float | None, seconds: float, is_elastic: bool
) -> None:
    excess = forecast(load(free_blocks=100), asked(500, timeout_s=timeout_s), EXPERIENCE, CONFIG).excess
    assert (excess.seconds, excess.is_elastic) == (seconds, is_elastic)
    assert "10.0 s" in excess.message


def test_experience_begins_with_a_guess_and_becomes_a_running_mean() -> None:
    experience = Experience()
    experience.learn(3.0, 60.0)
    assert experience.num_answers == 1
    assert experience.tokens_per_estimate == pytest.approx(1.0 + 2.0 / 17)
    assert experience.output_tokens == pytest.approx(128.0 - 68.0 / 17)
    before = experience.tokens_per_estimate
    experience.learn(None, None)
    assert (experience.num_answers, experience.tokens_per_estimate) == (2, before)
    experience.learn(1e9, None)
    assert experience.tokens_per_estimate == pytest.approx(before + (10.0 - before) / 19)
    experience.num_answers = 10_000
    experience.output_tokens = 100.0
    experience.learn(None, 200.0)
    assert experience.output_tokens == pytest.approx(102.0)


def test_what_requests_waited_corrects_the_wait_and_the_cost_of_the_next() -> None:
    experience = Experience(output_tokens=128.0, num_answers=64)
    for second in range(60):
        experience.learn_wait(10.0, 12.0, 1000.0 + second)
    assert experience.correction == pytest.approx(1.2, rel=0.02)
    before = forecast(
        load(queued_requests=5, queued_tokens=200), asked(80), replace(EXPERIENCE, num_answers=64), CONFIG
    )
    after = forecast(
        load(queued_requests=5, queued_tokens=200), asked(80), replace(experience, tokens_per_estimate=2.0), CONFIG
    )
    assert after.wait_s == pytest.approx(experience.correction * before.wait_s)
    assert after.cost_s == pytest.approx(experience.correction * before.cost_s)
    # What is learned from next is what the rates alone say, and no other prompt is at fault for one's own.
    assert after.uncorrected_wait_s == pytest.approx(before.wait_s) == pytest.approx(before.uncorrected_wait_s)
    assert after.own_s == before.own_s


@pytest.mark.parametrize(("waited_s", "correction"), [(1e9, 2.0), (0.0, 0.5), (-5.0, 0.5), (10.0, 1.0)])
def test_correction_is_bounded(waited_s: float, correction: float) -> None:
    experience = Experience()
    for second in range(100):
        experience.learn_wait(10.0, waited_s, float(second))
    assert experience.correction == correction


def test_few_or_short_or_old_waits_correct_little() -> None:
    experience = Experience()
    experience.learn_wait(0.4, 40.0, 0.0)
    assert experience.correction == 1.0
    experience.learn_wait(1.0, 1e9, 1.0)
    assert experience.correction == pytest.approx((30 + 4) / (30 + 1))
    for _ in range(20):
        experience.learn_wait(10.0, 20.0, 2.0)
    assert experience.correction > 1.8
    experience.learn_wait(10.0, 10.0, 2.0 + 300)
    assert experience.correction == pytest.approx(1.0, abs=0.01)


def test_prediction_of_what_knows_few_answers_is_not_learned_from() -> None:
    busy = load(queued_requests=5, queued_tokens=200)
    young, old = (replace(EXPERIENCE, num_answers=number) for number in (63, 64))
    assert forecast(busy, asked(80), young, CONFIG).uncorrected_wait_s == 0.0
    assert forecast(busy, asked(80), old, CONFIG).uncorrected_wait_s > 0.0
