"""The state that the console shows."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from msgspec.structs import replace

from gateway.console.views import NowView
from shared.disaggregation import RoleNews
from shared.timeline import GatewayCounts
from shared.worker_metrics import GpuReading, WorkerMetrics
from tests.gateway.fleet.test_worker_needs import beat


async def test_oldest_request_is_that_of_all_gateways_and_workers_have_roles() -> None:
    load = SimpleNamespace(
        **dict.fromkeys(("num_workers", "running", "queued_tokens"), 0), model="m", queued_requests=9
    )
    load.prefill_rate = load.decode_rate = 0.0
    metrics = WorkerMetrics(gpus=[GpuReading("GPU-1", 0.5)])
    beats = [replace(beat("w0"), metrics=metrics), replace(beat("w1"), roles=RoleNews(role="decode"))]
    fleet: Any = SimpleNamespace(models=lambda: ["m"], load=lambda model: load, workers=lambda: beats)
    fleet.hosted = SimpleNamespace(shown=list)
    counts = [GatewayCounts(gateway="one"), GatewayCounts(gateway="other", oldest_s={"m": 7.5, "n": 99.0})]
    exchange: Any = SimpleNamespace(counts=AsyncMock(return_value=counts))
    dispatcher: Any = SimpleNamespace(fleet=fleet, oldest_unclaimed_s=lambda: defaultdict(float))
    view = await NowView(dispatcher, exchange).view()
    oldest = {each["lane"]: (each["waiting"], each["oldest_s"]) for each in view["queues"]}
    assert oldest == {"interactive": (9, 7.5), "batch": (0, 0.0)}
    assert [each["role"] for each in view["workers"]] == [None, "decode"]
    shown = [[(gpu["name"], gpu["utilization"]) for gpu in each["gpus"]] for each in view["workers"]]
    assert shown == [[("GPU-1", 0.5)], []]
