import pytest

from gpu_worker.engine.engine import Rate, StepRates


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
