"""Metrics in heartbeats: what is out of bounds is refused, field by field, and the size is bounded."""

from __future__ import annotations

import msgspec
import pytest

from shared.worker_metrics import GpuReading, HistogramCounts, KvGroup, WorkerMetrics
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
