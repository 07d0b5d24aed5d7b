"""The bare gateway answers what clients of ours ask, beside it and before the same worker."""

from __future__ import annotations

import pytest

from ops.bench.load.event_streams import Address, count_streams
from ops.bench.load.systems import API_KEY, MODEL, isolated_gateway


@pytest.mark.slow
async def test_both_gateways_give_every_token_of_every_stream() -> None:
    with isolated_gateway(5.0) as run:
        for port, key in ((run.port, API_KEY), (run.bare_port, "none")):
            address = Address("127.0.0.1", port, MODEL, key)
            requests = [address.completion(f"stream {number}", 20) for number in range(8)]
            samples = await count_streams(address, requests, 2)
            assert (samples.num_requests, samples.num_tokens, samples.num_failures) == (16, 320, 0)
