"""The fleet as this gateway sees it, for Prometheus: one row per model, from the workers' heartbeats."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.readiness import FleetView

_GAUGES = {
    "num_workers": ("workers", "Live workers that take requests."),
    "running": ("running", "Sequences in the workers' batches."),
    "queued_requests": ("queued_requests", "Requests waiting in workers or in the queue."),
    "queued_tokens": ("queued_tokens", "Prompt tokens of the waiting requests."),
    "prefill_rate": ("prefill_tokens_per_second", "Measured prompt tokens per second."),
    "decode_rate": ("decode_tokens_per_second", "Measured generated tokens per second."),
    "free_blocks": ("free_blocks", "KV blocks that a new sequence could have."),
    "total_blocks": ("total_blocks", "KV blocks."),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Times that sequences verified drafts in a step."),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
}


class FleetCollector(Collector):
    """Reads a `FleetView` when Prometheus scrapes."""

    def __init__(self, fleet: FleetView) -> None:
        """Report on `fleet`."""
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yield every gauge, one sample a model."""
        loads = [load for model in self._fleet.models() if (load := self._fleet.load(model)) is not None]
        for attribute, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"headrace_fleet_{name}", text, labels=["model"])
            for load in loads:
                gauge.add_metric([load.model], getattr(load, attribute))
            yield gauge
