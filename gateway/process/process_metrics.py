"""The metrics that a scrape of a gateway process returns: its own, the fleet's, and those of the processes beside it.

`MetricsBoard` is memory that the parent makes before it forks: one slot a process. Each process writes its own slot
about once a second, and the process that is scraped reads the others'. Samples keep the label of their process. The
parent clears the slot of a process that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import struct
import zlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.dispatch.dispatcher import Dispatcher
from gateway.fleet.fleet_collector import FleetCollector
from gateway.fleet.worker_needs import WorkerNeeds
from gateway.metrics import MetricsCollector, make_registry
from gateway.telemetry.drift_watch import DriftWatch
from gateway.telemetry.stream_watch import StreamWatch, UsageWatch
from shared.direct_client import DirectClient
from shared.task_supervisor import TaskSupervisor

PUBLISH_INTERVAL_S = 1.0
SLOT_BYTES = 2 << 20

# Length of the content, and its checksum: a slot that is being written, or whose writer died meanwhile, does not match.
_HEADER = struct.Struct("<II")
_READ_ATTEMPTS = 3

_logger = logging.getLogger(__name__)


class Family(msgspec.Struct, array_like=True):
    """One metric with its samples: name, labels and value of each."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class MetricsBoard:
    """One slot a process in shared memory; a slot's only writer is its process, and the parent once that has ended."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._memory = mmap.mmap(-1, num_slots * SLOT_BYTES)

    def write(self, slot: int, content: bytes) -> None:
        """Replace a slot's content; `ValueError` if it does not fit."""
        if len(content) > SLOT_BYTES - _HEADER.size:
            raise ValueError(f"{len(content)} bytes do not fit into {SLOT_BYTES - _HEADER.size}")
        begin = slot * SLOT_BYTES
        record = _HEADER.pack(len(content), zlib.crc32(content)) + content
        self._memory[begin : begin + len(record)] = record

    def read(self, slot: int) -> bytes:
        """Return a slot's content; empty where there is none, or none that is whole."""
        begin = slot * SLOT_BYTES
        for _ in range(_READ_ATTEMPTS):
            length, checksum = _HEADER.unpack_from(self._memory, begin)
            content = self._memory[begin + _HEADER.size : begin + _HEADER.size + min(length, SLOT_BYTES)]
            if zlib.crc32(content) == checksum:
                return content
        return b""

    def clear(self, slot: int) -> None:
        """Empty the slot of a process that has ended."""
        self.write(slot, b"")


class BoardCollector(Collector):
    """Collects one process's own metrics as they are now, and the others' from the board."""

    def __init__(self, board: MetricsBoard, slot: int, *own: Collector) -> None:
        self._board = board
        self._slot = slot
        self._own = own
        self._decoder = msgspec.msgpack.Decoder(list[Family])

    def publish(self) -> None:
        """Show the other processes this one's metrics."""
        families = [
            Family(each.name, each.documentation, each.type, [(s.name, s.labels, float(s.value)) for s in each.samples])
            for collector in self._own
            for each in collector.collect()
        ]
        self._board.write(self._slot, msgspec.msgpack.encode(families))

    async def publish_forever(self) -> None:
        """Publish once a second."""
        while True:
            try:
                self.publish()
            except ValueError:
                _logger.exception("metrics not shared with the other processes")
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the samples of all processes."""
        merged = {metric.name: metric for collector in self._own for metric in collector.collect()}
        for slot in range(self._board.num_slots):
            content = self._board.read(slot) if slot != self._slot else b""
            for family in self._decoder.decode(content) if content else []:
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for name, labels, value in family.samples:
                    metric.add_sample(name, labels, value)
        yield from merged.values()


def drift_watch(nats: DirectClient, dispatcher: Dispatcher) -> DriftWatch:
    """Return what compares the answers of a dispatcher's workers."""
    fleet, answers = dispatcher.fleet, dispatcher.counts.metrics.answers
    live = lambda: {beat.worker for beat in fleet.workers()}  # noqa: E731
    return DriftWatch(nats.jetstream(), dispatcher.name, answers, lambda: fleet.is_eldest, live, lambda: fleet.gateways)


@contextlib.asynccontextmanager
async def scrape_registry(
    nats: DirectClient,
    dispatcher: Dispatcher,
    needs: WorkerNeeds,
    drift: DriftWatch,
    slot: int,
    board: MetricsBoard | None,
    tasks: TaskSupervisor,
) -> AsyncIterator[CollectorRegistry]:
    """Make the registry of a process, and run the tasks that keep it current until the block ends.

    At the end of the block the counts of answers are stored.

    `slot` is the process's slot on `board`, where processes that share the port exchange their metrics.
    """
    fleet = dispatcher.fleet
    streams = StreamWatch(nats.jetstream(), lambda: fleet.is_eldest)
    usage = UsageWatch(nats.jetstream(), lambda: fleet.is_eldest)
    fleet_collector = FleetCollector(fleet, dispatcher.oldest_unclaimed_s, streams, usage, needs, slot)
    own = (MetricsCollector(dispatcher.counts.metrics, slot), fleet_collector, drift)
    work: list[tuple[Coroutine[Any, Any, None], str]] = [
        (streams.watch_forever(), "watch of streams"),
        (usage.watch_forever(), "watch of usage"),
        (needs.watch_forever(), "needs for workers"),
        (drift.watch_forever(), "comparison of answers"),
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
        await drift.store()
