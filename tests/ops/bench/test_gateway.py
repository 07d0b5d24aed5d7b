"""The row of one measurement of a gateway: what the streams saw, in milliseconds."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench import gateway
from ops.bench.systems import Target, address_of
from ops.load_generator.connection import Address
from ops.load_generator.rounds import Samples


async def test_row_has_the_middle_and_the_longest_times_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def streamed(address: Address, requests: list[bytes], *options: object) -> Samples:
        assert len(requests) == 3
        return Samples(2.0, 10, 400, 1, [each / 1000 for each in range(1, 101)], [0.004] * 5, [])

    monkeypatch.setattr(gateway, "count_streams", streamed)
    target = Target("one", Address("127.0.0.1", 1, "m", "k"), {"gateway": []})
    row: dict[str, Any] = await gateway._measure(target, (3, 8, 2, False), 0.0)
    assert [row[f"ttft_p{percent}_ms"] for percent in (50, 95, 99)] == pytest.approx([50, 95, 99], abs=1)
    assert [row[f"gap_p{percent}_ms"] for percent in (50, 95, 99)] == [4.0] * 3
    assert [row[f"delay_p{percent}_ms"] for percent in (50, 95, 99)] == [None] * 3
    assert (row["requests_per_s"], row["tokens_per_s"], row["failures"]) == (5.0, 200, 1)


def test_system_elsewhere_is_not_driven() -> None:
    assert address_of({"url": "http://127.0.0.1:8000", "api_key": "k"}, "m") == Address("127.0.0.1", 8000, "m", "k")
    with pytest.raises(SystemExit, match="is not on loopback"):
        address_of({"url": "http://gateway.example:8000", "api_key": "k"}, "m")
