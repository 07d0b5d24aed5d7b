"""The bare gateway answers what clients of ours ask, beside it and before the same worker."""

from __future__ import annotations

import pytest

from ops.bench.load.event_streams import count_streams
from ops.bench.load.systems import isolated_gateways


@pytest.mark.slow
async def test_both_gateways_give_every_token_of_every_stream() -> None:
    with isolated_gateways(5.0) as targets:
        assert [target.name for target in targets] == ["isolated", "bare"]
        for target in targets:
            requests = [target.address.completion(f"stream number {number}", 20) for number in range(8)]
            samples = await count_streams(target.address, requests, 2)
            assert (samples.num_requests, samples.num_tokens, samples.num_failures) == (16, 320, 0)
