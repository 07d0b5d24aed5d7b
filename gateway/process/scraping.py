"""What a scrape of a gateway process shows: its own metrics, the fleet's, and those of the processes beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.dispatch.dispatcher import Dispatcher
from gateway.fleet.fleet_collector import FleetCollector
from gateway.metrics import GatewayMetrics, MetricsCollector, make_registry
from gateway.process.process_metrics import BoardCollector, MetricsBoard
from gateway.telemetry.stream_watch import StreamWatch
from gateway.telemetry.usage_watch import UsageWatch
from shared.direct_client import DirectClient
from shared.task_supervisor import TaskSupervisor


@contextlib.asynccontextmanager
async def scrape_registry(
    metrics: GatewayMetrics,
    nats: DirectClient,
    dispatcher: Dispatcher,
    slot: int,
    board: MetricsBoard | None,
    tasks: TaskSupervisor,
) -> AsyncIterator[CollectorRegistry]:
    """Make the registry of a process, and run what keeps it current until the block ends.

    Args:
        metrics: What the process counts.
        nats: Asked how full the streams are.
        dispatcher: Knows the fleet.
        slot: Number of the process among those that share the port.
        board: Where these show each other their metrics; None for a process alone.
        tasks: Runs what runs.
    """
    fleet = dispatcher.fleet
    streams = StreamWatch(nats.jetstream(), lambda: fleet.is_eldest)
    usage = UsageWatch(nats.jetstream(), lambda: fleet.is_eldest)
    own = (MetricsCollector(metrics, slot), FleetCollector(fleet, dispatcher, streams, usage, slot))
    work: list[tuple[Coroutine[Any, Any, None], str]] = [
        (streams.watch_forever(), "watch of streams"),
        (usage.watch_forever(), "watch of usage"),
    ]
    if board is None:
        registry = make_registry(*own)
    else:
        collector = BoardCollector(board, slot, *own)
        registry = make_registry(collector)
        work.append((collector.publish_forever(), "metrics for the processes beside"))
    running = [tasks.start(coroutine, name) for coroutine, name in work]
    try:
        yield registry
    finally:
        await tasks.stop(*running)
