"""Metrics in heartbeats: values out of bounds are refused by field, and the size is bounded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.worker_metrics import GpuReading, Histogram, HistogramCounts, KvGroup, WorkerMetrics
from tests.bounded_types import Number, illegal_numbers, leaves

MAX_MSGPACK = 2**64 - 1
EXAMPLES = (WorkerMetrics(), HistogramCounts((), 0.0), GpuReading("g"), KvGroup("k", 0, 0))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_field_outside_its_bounds_is_refused(example: msgspec.Struct) -> None:
    struct = type(example)
    decoder = msgspec.msgpack.Decoder(struct)
    names = struct.__struct_fields__
    good = [getattr(example, name) for name in names]
    assert decoder.decode(msgspec.msgpack.encode(good)) == example
    for leaf in leaves(struct):
        if len(leaf.path) > 1:
            continue
        values = illegal_numbers(leaf.type) if isinstance(leaf.type, Number) else [1, "x" * 257, [0] * 10_000]
        for value in values:
            if isinstance(value, int) and not -(2**63) <= value <= MAX_MSGPACK:
                continue
            changed = [value if name == leaf.path[0] else own for name, own in zip(names, good, strict=True)]
            with pytest.raises(msgspec.DecodeError):
                decoder.decode(msgspec.msgpack.encode(changed))


def test_older_worker_without_the_last_fields_is_read() -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode([7, 3]), type=WorkerMetrics)
    assert decoded == WorkerMetrics(prompt_tokens=7, prefix_hits=3)


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
