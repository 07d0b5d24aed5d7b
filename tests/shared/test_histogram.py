"""Histograms: which bucket takes a value, and what Prometheus is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.worker_metrics import Histogram


def test_value_is_counted_into_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((-1.0, 0.0, 1.0))
    for value in (-2.0, -1.0, 0.5, 1.0, 5.0):
        histogram.observe(value)
    assert histogram.buckets() == [("-1.0", 2), ("0.0", 2), ("1.0", 4), ("+Inf", 5)]
    assert histogram.total == 3.5
    assert histogram.count == 5


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5))))
def test_value_counted_several_times_is_as_many_values(values: list[tuple[float, int]]) -> None:
    together, one_by_one = Histogram((-1.0, 0.0, 1.0)), Histogram((-1.0, 0.0, 1.0))
    for value, times in values:
        together.observe(value, times)
        for _ in range(times):
            one_by_one.observe(value)
    assert together.counts == one_by_one.counts
    assert abs(together.total - one_by_one.total) < 1e-6
