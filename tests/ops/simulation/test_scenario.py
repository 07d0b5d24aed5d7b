from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from ops.simulation.outcome import Outcome
from ops.simulation.report import figures
from ops.simulation.step_time import HostTimes, LinearTimes, Spread, StepTimes
from ops.simulation.workload import Arrival, Synthetic
from tests.ops.simulation.fleets import CONFIG, PLAIN, STEP_S, served

SPREAD = StepTimes(
    LinearTimes(0.006, 2e-4, 3e-5, 1e-7, 1e-9), HostTimes(1e-3, 1e-4), Spread((0.9, 1.0, 1.4), (0.8, 1.2))
)


def test_lone_request_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    outcome = served([Arrival(1.0, 100, 20)])
    assert outcome.ttft_s[50] == pytest.approx(STEP_S)
    assert outcome.end_s[50] == pytest.approx(20 * STEP_S)
    assert outcome.itl_s[99] == pytest.approx(STEP_S, rel=0.01)
    assert outcome.num_output_tokens == 20


def test_long_prompt_takes_as_many_steps_as_its_tokens_fill() -> None:
    assert served([Arrival(0.0, 1025, 1)]).ttft_s[50] == pytest.approx(3 * STEP_S)


def test_full_worker_generates_a_token_per_slot_and_step() -> None:
    outcome = served(Synthetic(400, math.inf, 16, 50), ttft_slo_s=1e6)
    # A step for each prompt's first token, too: answers end and begin all the time.
    assert outcome.output_tokens_per_s == pytest.approx(CONFIG.max_num_seqs / STEP_S, rel=0.02)


def test_utilization_is_what_littles_law_says() -> None:
    rate, output = 4.0, 50
    outcome = served(Synthetic(1500, rate, 16, output))
    running = sum(moment.running for moment in outcome.moments) / len(outcome.moments)
    assert running == pytest.approx(rate * output * STEP_S, rel=0.1)


def test_queue_of_one_slot_waits_as_pollaczek_and_khinchine_say() -> None:
    output, rate = 10, 6.0
    service_s = output * STEP_S
    one = replace(CONFIG, max_num_seqs=1)
    outcome = served(Synthetic(4000, rate, 16, output), config=one, ttft_slo_s=1e6)
    load = rate * service_s
    waited_s = load * service_s / (2 * (1 - load))
    mean_s = sum(outcome.ttfts_s) / len(outcome.ttfts_s) - STEP_S
    assert mean_s == pytest.approx(waited_s, rel=0.15)


def test_host_time_between_steps_is_added_and_is_no_use_of_the_device() -> None:
    times = StepTimes(LinearTimes(0.006), HostTimes(0.003, 0.001))
    outcome = served([Arrival(0.0, 16, 100)], times=times)
    assert outcome.itl_s[50] == pytest.approx(0.01, rel=0.01)
    assert outcome.device_share == pytest.approx(0.6, rel=0.02)


def test_decode_attends_to_all_tokens_before_it_and_to_its_own() -> None:
    outcome = served([Arrival(0.0, 100, 3)], times=StepTimes(LinearTimes(STEP_S, context_s=1e-3)))
    assert outcome.end_s[50] == pytest.approx(3 * STEP_S + 0.101 + 0.102)


def test_steps_behind_a_prompt_take_longer_and_caches_warm_up_again() -> None:
    outcome = served([Arrival(0.0, 160, 4)], times=StepTimes(LinearTimes(STEP_S), cold_s=0.008))
    assert outcome.end_s[50] == pytest.approx(4 * STEP_S + 0.008 + 0.004 + 0.002)


def test_steps_differ_from_their_prediction_as_the_spread_says() -> None:
    outcome = served([Arrival(0.0, 100, 200)], times=StepTimes(LinearTimes(STEP_S), spread=Spread((0.5, 1.5))))
    assert outcome.itl_s[50] == pytest.approx(STEP_S, rel=0.15)
    assert outcome.itl_s[99] == pytest.approx(1.5 * STEP_S, rel=0.05)


def test_death_of_a_worker_loses_nothing_and_is_seen_as_a_pause() -> None:
    outcome = served(Synthetic(200, 20.0, 64, 40), workers=2, kills=((1, 3.0),))
    assert outcome.num_served == 200
    assert outcome.num_moves > 0
    assert outcome.num_output_tokens == 200 * 40
    whole = served(Synthetic(200, 20.0, 64, 40), workers=2)
    assert max(outcome.ttfts_s) >= max(whole.ttfts_s)


def test_moved_request_computes_only_what_is_left() -> None:
    outcome = served([Arrival(0.0, 64, 100)], workers=2, kills=((0, 0.505),))
    # 50 tokens, a second until the death is noticed, one step for prompt and tokens, and the others.
    assert outcome.end_s[50] == pytest.approx(0.505 + 1.0 + 50 * STEP_S, abs=STEP_S)
    assert (outcome.num_moves, outcome.num_output_tokens) == (1, 100)


def test_requests_that_no_worker_is_left_for_are_told() -> None:
    outcome = served(Synthetic(50, 10.0, 64, 40), kills=((0, 1.0),), max_retries=0)
    assert outcome.num_unserved > 0
    assert outcome.num_served + outcome.num_unserved + outcome.num_given_up == 50


def test_overload_is_refused_and_those_who_come_back_are_served() -> None:
    # A worker serves 16 of these a second.
    load = Synthetic(600, 32.0, 64, 50)
    shed = served(load, ttft_slo_s=1.0, max_retries=0)
    assert shed.num_given_up == shed.num_refusals > 100
    assert shed.ttft_s[99] < 3.0
    patient = served(load, ttft_slo_s=1.0, max_retries=20)
    assert patient.num_retried > 100
    assert patient.num_given_up < shed.num_given_up / 4
    endless = served(load, ttft_slo_s=1e6)
    assert (endless.num_refusals, endless.num_served) == (0, 600)
    assert endless.ttft_s[99] > 10.0


def test_request_that_a_slot_is_free_for_is_not_refused_whatever_runs() -> None:
    busy = [Arrival(0.0, 16, 1000) for _ in range(7)]
    assert served([*busy, Arrival(1.0, 16, 1)], ttft_slo_s=0.2, max_retries=0).num_refusals == 0
    assert served([*busy, *busy, Arrival(1.0, 16, 1)], ttft_slo_s=0.2, max_retries=0).num_refusals > 0


def test_prompt_longer_than_a_worker_holds_is_refused_alone() -> None:
    outcome = served([Arrival(0.0, 5000, 5), Arrival(0.0, 50, 5)])
    assert (outcome.num_too_long, outcome.num_served, outcome.num_requests) == (1, 1, 2)


def test_common_beginnings_are_computed_once() -> None:
    shared = served(Synthetic(100, 5.0, 400, 5, shared_prefix=320))
    assert shared.num_cached_tokens / shared.num_prompt_tokens > 0.7
    apart = served(Synthetic(100, 5.0, 400, 5))
    assert apart.num_cached_tokens == 0


def test_tenant_that_sends_little_does_not_wait_behind_one_that_floods() -> None:
    flood = [Arrival(0.0, 64, 50, "flood") for _ in range(400)]
    person = [Arrival(2.0 + number, 64, 5, "person") for number in range(5)]
    outcome = served(sorted([*flood, *person], key=lambda each: each.at), ttft_slo_s=1e6)
    first = sorted(outcome.ttfts_s)
    assert sum(each < 1.0 for each in first) >= 5
    assert first[-1] > 10.0


def _bytes(outcome: Outcome) -> str:
    return json.dumps(figures(PLAIN, outcome, None, {}))


@pytest.mark.parametrize("change", [lambda load: load, lambda load: replace(load, burstiness=1 / 9)])
def test_same_seed_gives_the_same_bytes(change: Callable[[Synthetic], Synthetic]) -> None:
    load = change(Synthetic(200, 20.0, 100, 30, spread=1.0, tenants=3))
    settings = {"times": SPREAD, "workers": 3, "ttft_slo_s": 0.5}
    first, again = (_bytes(served(load, **settings)) for _ in range(2))
    assert first == again
    assert first != _bytes(served(load, **settings | {"seed": 1}))
