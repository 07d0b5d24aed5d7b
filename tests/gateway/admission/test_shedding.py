"""Shedding: the prediction by hand-made loads, refusals with an honest Retry-After, and what it learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.admission.caller import Caller
from gateway.admission.forecast import Experience, forecast
from gateway.admission.shedding import Prediction, Shedder
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation, Prompt
from gateway.metrics import GatewayMetrics
from shared.hosted_models import HostedModel, HostedState
from shared.sampling import Sampling

CONFIG = GatewayConfig(interactive_ttft_slo_s=10.0, max_queued_requests=100, max_queued_tokens=200_000)

IDLE = FleetLoad(
    model="m",
    num_workers=1,
    running=0,
    queued_requests=0,
    queued_tokens=0,
    prefill_rate=1000.0,
    decode_rate=100.0,
    free_blocks=1000,
    total_blocks=1000,
    block_size=16,
    max_model_len=4096,
    free_slots=8,
)


def caller(body: bytes = b"", **headers: str) -> Caller:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Caller("key", "tenant", raw, body)


def generation(tokens: int = 100, timeout_s: float | None = None, n: int = 1) -> Generation:
    prompts = (Prompt(estimated_tokens=tokens, text="x"),)
    return Generation("completion", "m", prompts, n, Sampling(), False, timeout_s=timeout_s)


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics()


@pytest.fixture
def shedder(metrics: GatewayMetrics) -> Shedder:
    return Shedder(CONFIG, metrics, uniform=lambda: 0.5)


def refused(shedder: Shedder, load: FleetLoad | None, wanted: Generation, who: Caller | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        shedder.admit(load, wanted, who or caller())
    return caught.value


def test_idle_fleet_predicts_the_prompts_own_time(shedder: Shedder) -> None:
    assert shedder.admit(IDLE, generation(500), caller()).ttft_s == pytest.approx(0.5)


def test_rates_that_no_worker_has_make_no_endless_times(shedder: Shedder) -> None:
    load = replace(IDLE, queued_requests=3, queued_tokens=4000, free_slots=0, prefill_rate=1e-320, decode_rate=1e-320)
    expected = forecast(load, generation(500), Experience(), CONFIG)
    assert all(map(math.isfinite, (expected.wait_s, expected.own_s, expected.cost_s, expected.excess.seconds)))
    assert "inf" not in refused(shedder, load, generation(500)).message


def test_queued_tokens_are_computed_first(shedder: Shedder) -> None:
    load = replace(IDLE, queued_requests=3, queued_tokens=4000)
    assert shedder.admit(load, generation(500), caller()).ttft_s == pytest.approx(4.5)


def test_full_workers_wait_for_departures_and_the_blocks_of_these(shedder: Shedder) -> None:
    # 128 output tokens a sequence at 100 tokens/s: one departure every 1.28 s; 2 in the queue and this one need three.
    load = replace(IDLE, running=8, free_slots=0, queued_requests=2, queued_tokens=0)
    assert shedder.admit(load, generation(100), caller()).ttft_s == pytest.approx(3 * 1.28 + 0.1)
    # 100 prompt tokens need 6.25 blocks; four running sequences hold 250 blocks each.
    load = replace(IDLE, running=4, free_slots=4, free_blocks=0)
    assert shedder.admit(load, generation(1600), caller()).ttft_s == pytest.approx(100 / 250 * 1.28 + 1.6)


def test_prediction_beyond_the_objective_is_refused_until_the_excess_has_drained(
    shedder: Shedder, metrics: GatewayMetrics
) -> None:
    load = replace(IDLE, queued_requests=5, queued_tokens=25_000)
    error = refused(shedder, load, generation(1000))
    assert (error.status, error.code) == (503, "overloaded")
    # 16 s too long; 1.28 s for itself; and 5 % of each second are not promised.
    assert error.retry_after_s == 19
    assert error.headers["x-headrace-place"] == "booked"
    assert "Try again in 19 s: a place is kept for you then." in error.message
    assert (+metrics.shed, metrics.promises["made"]) == ({"overloaded": 1}, 1)
    drained = replace(load, queued_tokens=25_000 - 16_000)
    assert Shedder(CONFIG, metrics).admit(drained, generation(1000), caller()).ttft_s == pytest.approx(10.0)


def test_own_timeout_replaces_the_objective(shedder: Shedder) -> None:
    load = replace(IDLE, queued_requests=5, queued_tokens=25_000)
    assert shedder.admit(load, generation(1000, timeout_s=30), caller()).ttft_s == pytest.approx(26)
    assert refused(shedder, replace(IDLE, queued_tokens=2000), generation(100, timeout_s=1.5)).code == "overloaded"


def test_long_prompt_is_admitted_by_an_idle_fleet(shedder: Shedder) -> None:
    prediction = shedder.admit(IDLE, generation(60_000), caller())
    assert (prediction.ttft_s, prediction.own_s) == pytest.approx((60, 60))
    assert refused(shedder, replace(IDLE, queued_tokens=5001), generation(60_000)).status == 503


def test_timeout_too_short_for_the_prompt_at_the_present_load_is_ours_to_mend(shedder: Shedder) -> None:
    # A prompt that takes exactly as long as it may is in time.
    assert shedder.admit(IDLE, generation(5000, timeout_s=5), caller()).ttft_s == 5.0
    waiting = replace(IDLE, queued_requests=1, queued_tokens=2000)
    assert refused(shedder, waiting, generation(60_000, timeout_s=5)).code == "overloaded"


def test_timeout_too_short_for_the_prompt_alone_is_the_clients_to_mend(shedder: Shedder) -> None:
    error = refused(shedder, IDLE, generation(60_000, timeout_s=5))
    assert (error.status, error.param, error.code) == (400, "timeout", "timeout_too_short")


@pytest.mark.parametrize("rate", [0.0, 1000.0])
def test_queue_bounds_hold_whether_rates_are_known_or_not(shedder: Shedder, rate: float) -> None:
    full = replace(IDLE, queued_requests=100, queued_tokens=1000, prefill_rate=rate, decode_rate=rate / 10)
    error = refused(shedder, full, generation(n=2))
    assert (error.status, error.code) == (503, "queue_full")
    heavy = replace(IDLE, queued_requests=2, queued_tokens=199_950, prefill_rate=rate)
    assert refused(shedder, heavy, generation(100)).code == "queue_full"


@pytest.mark.parametrize("n", [101, 1000])
def test_more_sequences_than_the_queue_bound_are_admitted_by_an_idle_fleet(shedder: Shedder, n: int) -> None:
    prediction = shedder.admit(replace(IDLE, decode_rate=0.0, free_slots=2000), generation(1, n=n), caller())
    assert prediction.num_sequences == n


def test_unknown_rates_admit_up_to_the_bounds_without_a_prediction(shedder: Shedder, metrics: GatewayMetrics) -> None:
    load = replace(IDLE, queued_requests=99, queued_tokens=150_000, prefill_rate=0.0, decode_rate=0.0)
    prediction = shedder.admit(load, generation(), caller())
    assert prediction.ttft_s is None
    shedder.observe(prediction, 3.0)
    assert sum(metrics.prediction_error_s.counts) == 0


def test_bound_that_is_far_away_leaves_room_while_the_rate_is_unknown() -> None:
    load = replace(IDLE, queued_requests=2, queued_tokens=4, prefill_rate=0.0)
    excess = forecast(load, generation(), Experience(), CONFIG).excess
    assert (excess.reason, excess.seconds) == ("overloaded", -CONFIG.interactive_ttft_slo_s)


def test_unknown_model_is_a_404_and_a_model_without_workers_a_503(shedder: Shedder) -> None:
    error = refused(shedder, None, generation())
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    error = refused(shedder, replace(IDLE, num_workers=0), generation())
    assert (error.status, error.code) == (503, "no_worker")
    assert error.retry_after_s is not None


def test_prediction_error_is_exported_with_its_sign(shedder: Shedder, metrics: GatewayMetrics) -> None:
    shedder.observe(shedder.admit(IDLE, generation(500), caller()), 0.3)
    assert metrics.prediction_error_s.total == pytest.approx(-0.2)


def test_token_estimates_are_corrected_by_what_workers_count(shedder: Shedder) -> None:
    for _ in range(400):
        shedder.observe(shedder.admit(IDLE, generation(100), caller()), 0.1, prompt_tokens=200, completion_tokens=20)
    assert shedder.admit(IDLE, generation(100), caller()).ttft_s == pytest.approx(0.2, rel=0.01)
    full = replace(IDLE, running=8, free_slots=0)
    assert shedder.admit(full, generation(100), caller()).ttft_s == pytest.approx(0.2 + 0.2, rel=0.02)


@given(
    queued=st.integers(0, 10**7),
    rate=st.floats(0, 1e6),
    uniform=st.floats(0, 1, exclude_max=True),
    own=st.integers(1, 10**6),
    free=st.integers(0, 8),
)
def test_retry_after_is_always_between_one_and_sixty_seconds(
    queued: int, rate: float, uniform: float, own: int, free: int
) -> None:
    shedder = Shedder(CONFIG, GatewayMetrics(), uniform=lambda: uniform)
    load = replace(
        IDLE, queued_requests=queued // 50, queued_tokens=queued, prefill_rate=rate, running=8 - free, free_slots=free
    )
    try:
        prediction = shedder.admit(load, generation(own), caller())
    except ApiError as error:
        result: ApiError | Prediction = error
    else:
        result = prediction
    if isinstance(result, ApiError):
        assert result.status == 503
        assert result.retry_after_s is not None
        assert 1 <= result.retry_after_s <= 60
    else:
        assert queued // 50 < 100


@pytest.mark.parametrize(("uniform", "wait_s"), [(0.0, 1.5), (0.5, 2.0), (1.0, 2.5)])
def test_times_that_are_no_promise_are_spread_by_a_quarter(uniform: float, wait_s: float) -> None:
    shedder = Shedder(CONFIG, GatewayMetrics(), uniform=lambda: uniform)
    unknown = replace(IDLE, queued_requests=100, prefill_rate=0.0, decode_rate=0.0)
    for load, code in ((replace(IDLE, num_workers=0), "no_worker"), (unknown, "queue_full")):
        error = refused(shedder, load, generation())
        assert (error.code, error.retry_after_s) == (code, wait_s)
        assert "x-headrace-ticket" not in error.headers
        # The text says when to come back as the header does.
        assert f"in {math.ceil(wait_s)} s" in error.message
        assert dict(error.response_headers())[b"retry-after"] == b"%d" % math.ceil(wait_s)


def test_burst_on_an_idle_fleet_waits_for_slots_before_heartbeats_show_it(shedder: Shedder) -> None:
    burst = replace(IDLE, queued_requests=27, prefill_rate=0)
    # 20 sequences of 128 tokens must leave at 100 tokens a second.
    error = refused(shedder, burst, generation(1))
    assert (error.code, error.retry_after_s) == ("overloaded", math.ceil((20 * 1.28 - 10 + 1.28) / 0.95))


def test_returning_client_goes_before_newcomers_and_only_once() -> None:
    now = [100.0]
    metrics = GatewayMetrics()
    shedder = Shedder(CONFIG, metrics, clock=lambda: now[0])
    full = replace(IDLE, queued_requests=5, queued_tokens=25_000)
    wait_s = refused(shedder, full, generation(1000)).retry_after_s
    assert wait_s is not None
    now[0] += wait_s
    # There is room for one more, and it is kept.
    nearly = replace(IDLE, queued_requests=5, queued_tokens=9_000)
    error = refused(shedder, nearly, generation(1000), caller(b"another"))
    assert error.message.startswith("The next places of `m` are kept for those refused earlier (1). Try again in ")
    shedder.admit(nearly, generation(1000), caller())
    assert metrics.promises["kept"] == 1
    with pytest.raises(ApiError):
        shedder.admit(replace(nearly, queued_tokens=10_000), generation(1000), caller())
    assert metrics.promises["broken"] == 0
    # Who was told the truth counts as an error of nothing.
    assert (metrics.retry_after_error_s.count, metrics.retry_after_error_s.total) == (1, 0.0)


def test_promise_is_kept_although_the_prediction_was_half_an_objective_wrong() -> None:
    now = [100.0]
    metrics = GatewayMetrics()
    shedder = Shedder(CONFIG, metrics, clock=lambda: now[0])
    full = replace(IDLE, queued_requests=5, queued_tokens=25_000)
    for body in (b"one", b"other"):
        with pytest.raises(ApiError):
            shedder.admit(full, generation(1000), caller(body))
    now[0] += 30
    late = replace(IDLE, queued_requests=5, queued_tokens=14_000)
    # The first two seconds after the told time have passed: the place has gone to others.
    with pytest.raises(ApiError):
        shedder.admit(late, generation(1000), caller(b"one"))
    assert +metrics.promises == {"made": 3, "unused": 2}
    now[0] += 10
    error = refused(shedder, late, generation(1000), caller(b"one"))
    assert error.retry_after_s is not None
    assert "a place is kept for you" in error.message


@pytest.mark.parametrize(
    ("queued_tokens", "queued_requests", "is_kept"),
    [
        # The objective, half as much again on top of it, and the 19 s that were told, of which one is its own.
        (43_000, 5, True),
        (43_200, 5, False),
        # As many requests as may wait, and 2.56 s for the two too many: those are within half of the objective.
        (2_000, 101, True),
        # A queue that is full in length too is not stretched by what was told.
        (26_000, 101, False),
    ],
)
def test_promise_stretches_the_queue_by_what_was_told_but_not_its_length(
    queued_tokens: int, queued_requests: int, is_kept: bool
) -> None:
    now = [100.0]
    metrics = GatewayMetrics()
    shedder = Shedder(CONFIG, metrics, clock=lambda: now[0])
    told = refused(shedder, replace(IDLE, queued_requests=5, queued_tokens=25_000), generation(1000))
    assert told.retry_after_s == 19
    now[0] += 19
    load = replace(IDLE, queued_requests=queued_requests, queued_tokens=queued_tokens, free_slots=200)
    if is_kept:
        shedder.admit(load, generation(1000), caller())
    else:
        refused(shedder, load, generation(1000))
    assert (metrics.promises["kept"], metrics.promises["broken"]) == (int(is_kept), int(not is_kept))


def test_fleet_that_is_slower_than_it_says_admits_less() -> None:
    now = [100.0]
    shedder = Shedder(CONFIG, GatewayMetrics(), clock=lambda: now[0])
    busy = replace(IDLE, queued_requests=5, queued_tokens=8_000)
    prediction = shedder.admit(busy, generation(1000), caller())
    for _ in range(64):
        shedder.observe(prediction, 9.0)
    prediction = shedder.admit(busy, generation(1000), caller())
    for _ in range(10):
        shedder.observe(prediction, 1.0 + 1.5 * 8.0)
    assert refused(shedder, busy, generation(1000)).code == "overloaded"


def test_own_deadline_is_not_stretched_by_a_promise() -> None:
    now = [100.0]
    shedder = Shedder(CONFIG, GatewayMetrics(), clock=lambda: now[0])
    wanted = generation(1000, timeout_s=10)
    full = replace(IDLE, queued_requests=5, queued_tokens=25_000)
    wait_s = refused(shedder, full, wanted).retry_after_s
    assert wait_s is not None
    now[0] += wait_s
    assert refused(shedder, replace(full, queued_tokens=9_500), wanted).code == "overloaded"


def test_first_in_the_line_that_returns_too_early_has_no_booking() -> None:
    shedder = Shedder(CONFIG, GatewayMetrics(), clock=lambda: 100.0)
    full = replace(IDLE, queued_requests=5, queued_tokens=180_000)
    for is_retry in "01":
        error = refused(shedder, full, generation(1000), caller(x_stainless_retry_count=is_retry))
        assert "to keep your place" in error.message
        assert error.headers["x-headrace-place"] == "line"


def test_tenant_below_its_share_is_admitted_though_others_let_much_wait(shedder: Shedder) -> None:
    busy = replace(IDLE, running=8, free_slots=0, queued_requests=90, queued_tokens=9_000)
    assert refused(shedder, busy, generation()).code == "overloaded"
    share = busy.share(4, 1, 100)
    assert shedder.admit(busy, generation(), caller(), share).ttft_s == pytest.approx(0.1)
    with pytest.raises(ApiError):
        shedder.admit(busy, generation(n=2), caller(), share)
    # All blocks of its share are in use.
    with pytest.raises(ApiError):
        shedder.admit(busy, generation(), caller(), busy.share(4, 1, 250 * 16))


def test_tenant_leaves_places_in_the_queue_to_others(shedder: Shedder) -> None:
    rates = {"prefill_rate": 1e6, "decode_rate": 1e6}
    load = replace(IDLE, running=8, free_slots=0, queued_requests=87, queued_tokens=87, **rates)
    # 8 run and 87 wait, of 100: 13 places are left, and 91 are seven times that.
    assert shedder.admit(load, generation(1), caller(), num_own=8 + 87).num_sequences == 1
    full = replace(load, queued_requests=88, queued_tokens=88)
    error = refused_own(shedder, full, 8 + 88)
    assert (error.status, error.code) == (503, "queue_full")
    assert "88 of your tenant's requests are waiting for `m` already" in error.message
    assert error.retry_after_s is not None
    # One that has few waiting still finds a place there.
    assert shedder.admit(full, generation(1), Caller("other", "other", [], b""), num_own=9).num_sequences == 1


def refused_own(shedder: Shedder, load: FleetLoad, num_own: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        shedder.admit(load, generation(1), caller(), num_own=num_own)
    return caught.value


def coming(state: HostedState = "asleep", ready_in_s: float = 8.0, **changes: Any) -> FleetLoad:
    model = HostedModel(name="m", path="/m", state=state, on_demand=True, ready_in_s=ready_in_s, error="no /secret")
    return replace(IDLE, num_workers=0, free_slots=0, coming=model, **changes)


def test_request_waits_for_a_model_that_sleeps_and_is_told_how_long(shedder: Shedder) -> None:
    found = shedder.admit(coming(), generation(), caller())
    assert found.ttft_s == 8.0
    shedder.observe(found, 9.0, 100, 10)


def test_request_that_cannot_wait_for_a_model_is_told_when_it_will_serve(shedder: Shedder) -> None:
    error = refused(shedder, coming(), generation(timeout_s=5.0))
    assert (error.status, error.code) == (503, "waking")
    assert error.retry_after_s is not None
    # Not sooner than the model serves.
    assert 8.0 <= error.retry_after_s <= 10.0
    assert "8.0 s: it is being loaded." in error.message
    assert "it is being stopped" in refused(shedder, coming("stopping"), generation(timeout_s=5.0)).message
    full = refused(shedder, coming(queued_requests=100), generation())
    assert (full.code, full.retry_after_s) == ("queue_full", error.retry_after_s)


def test_one_tenant_has_not_the_whole_queue_of_a_model_that_sleeps(shedder: Shedder) -> None:
    load = coming(queued_requests=CONFIG.max_queued_requests * 7 // 8 + 1)
    error = refused_own(shedder, load, load.queued_requests)
    assert (error.status, error.code) == (503, "queue_full")
    assert shedder.admit(load, generation(), caller(), num_own=0).ttft_s == 8.0


def test_model_that_cannot_be_started_is_not_waited_for_and_its_files_are_not_told(shedder: Shedder) -> None:
    error = refused(shedder, coming("failed"), generation())
    assert (error.status, error.code) == (503, "model_failed")
    assert "secret" not in error.message
