"""What is counted of sequences: each end once, under vLLM's words, with the phases that its worker tells."""

from __future__ import annotations

import asyncio

from gateway.dispatch.counting import DispatchCounts
from gateway.dispatch.inflight import Flight
from gateway.metrics import GatewayMetrics
from shared.messages import Finish, Request, Timing, Usage
from tests.gateway.dispatch_bench import ListSink


async def test_ends_moves_gaps_and_quarantine_are_counted_by_model() -> None:
    metrics = GatewayMetrics()
    counts = DispatchCounts(metrics)
    now = asyncio.get_running_loop().time()
    flight = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, now, submitted_at=now - 10)
    counts.ended(flight, "completed", Finish("length", Usage(5, 3), timing=Timing(1.0, 2.0)))
    counts.ended(flight, "completed", Finish("stop", Usage(5, 3)))
    counts.ended(flight, "cancelled", None)
    counts.ended(flight, "failed", None)
    counts.moved("gap")
    counts.gap("m", 0.5, 3)
    counts.quarantined("worker_lost")
    model = metrics.by_model.model("m")
    assert model.finished == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert metrics.sequences == {"completed": 2, "failed": 1, "cancelled": 1}
    assert (model.prefill_s.total, model.decode_s.total) == (1.0, 2.0)
    assert (model.prompt_lengths.total, model.output_lengths.total) == (10, 6)
    assert model.mean_gap_s.total == 1.0
    # Ten seconds in all; three of them were computed.
    assert 6.9 < model.queue_s.total < 8
    assert (model.gap_s.count, model.gap_s.total) == (3, 1.5)
    assert +metrics.redispatches == {"gap": 1}
    assert +metrics.dead_letters == {"worker_lost": 1}
