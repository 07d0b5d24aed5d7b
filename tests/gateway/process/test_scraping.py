"""The registry of a gateway process: its own metrics, the fleet's and the streams', and those of its neighbours."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics, MetricsCollector
from gateway.process import process_metrics
from gateway.process.process_metrics import BoardCollector, MetricsBoard
from gateway.process.scraping import scrape_registry
from shared.task_supervisor import TaskSupervisor
from tests.gateway.dispatch_bench import Bench
from tests.gateway.wire_worker import until


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Return the values of a metric without labels but the process or the stream."""
    samples = [
        sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    return {next(iter(sample.labels.values())): sample.value for sample in samples if sample.name == name}


async def test_process_alone_shows_itself_the_fleet_and_the_streams(bench: Bench) -> None:
    metrics, tasks = GatewayMetrics(), TaskSupervisor()
    metrics.prompt_tokens = 7
    bench.dispatcher.fleet.started = 0.0
    await bench.worker("w")
    async with scrape_registry(metrics, bench.nats, bench.dispatcher, 3, None, tasks) as registry:
        assert values(registry, "headrace_prompt_tokens_total") == {"3": 7}
        assert values(registry, "headrace_fleet_workers")[bench.model] == 1
        await until(lambda: "HR_INTERACTIVE" in values(registry, "headrace_stream_messages"))
        running = set(tasks._tasks)
        assert {task.get_name() for task in running} == {"watch of streams", "watch of usage"}
    assert all(task.cancelled() for task in running)
    assert not tasks.has_failed.is_set()


async def test_processes_that_share_a_port_show_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "PUBLISH_INTERVAL_S", 0.01)
    board, metrics, tasks = MetricsBoard(3), GatewayMetrics(), TaskSupervisor()
    neighbour = GatewayMetrics()
    neighbour.prompt_tokens = 5
    BoardCollector(board, 2, MetricsCollector(neighbour, 2)).publish()
    async with scrape_registry(metrics, bench.nats, bench.dispatcher, 1, board, tasks) as registry:
        metrics.prompt_tokens = 7
        assert values(registry, "headrace_prompt_tokens_total") == {"1": 7, "2": 5}
        await until(lambda: b"headrace_prompt_tokens" in board.read(1))
        running = set(tasks._tasks)
        names = {"watch of streams", "watch of usage", "metrics for the processes beside"}
        assert {task.get_name() for task in running} == names
    assert all(task.cancelled() for task in running)
    board.clear(1)
    await asyncio.sleep(0.03)
    assert board.read(1) == b""
