"""What a worker counts of itself, as its heartbeats tell."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gpu_worker.consumer.heartbeat import REFRESH_S, MetricsSource, Readings
from gpu_worker.layers.placed_experts import ExpertLoad
from shared.messages import Heartbeat
from shared.sampling import Sampling
from shared.worker_metrics import STEP_SECONDS_BOUNDS, STEP_TOKENS_BOUNDS
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway


async def test_heartbeat_counts_tokens_steps_and_blocks(worker: RunningWorker, gateway: TestGateway) -> None:
    for _ in range(2):
        await gateway.ask("def add(a, b):\n" * 8, sampling=Sampling(max_tokens=7, ignore_eos=True))

    def is_complete(beat: Heartbeat) -> bool:
        return beat.metrics is not None and beat.metrics.generation_tokens == 14

    metrics = (await worker.wait_for_heartbeat(is_complete)).metrics
    assert metrics is not None
    # The second prompt is the first one again, but for its last block.
    assert metrics.prompt_tokens // 2 - 16 <= metrics.prefix_hits < metrics.prompt_tokens // 2
    assert metrics.prefill_tokens == metrics.prompt_tokens - metrics.prefix_hits - 2
    assert metrics.step_tokens is not None
    assert metrics.step_seconds is not None
    assert len(metrics.step_tokens.counts) == len(STEP_TOKENS_BOUNDS) + 1
    assert len(metrics.step_seconds.counts) == len(STEP_SECONDS_BOUNDS) + 1
    assert sum(metrics.step_tokens.counts) == sum(metrics.step_seconds.counts) == 14
    assert metrics.step_tokens.total == metrics.prefill_tokens + 14
    assert metrics.cpu_seconds > 0
    assert metrics.resident_bytes > 1 << 20
    (group,) = metrics.kv_groups
    assert (group.name, group.used_blocks, group.total_blocks) == ("full", 0, 4096)
    assert metrics.redelivered_interactive == 0


async def test_worker_that_ends_is_told_from_one_that_is_cordoned(worker: RunningWorker) -> None:
    consumer = worker.worker.consumer
    consumer.cordon()
    cordoned = await worker.wait_for_heartbeat(lambda beat: beat.draining)
    consumer._source.is_draining = True
    ending = await worker.wait_for_heartbeat(lambda beat: beat.is_ending)
    assert (cordoned.is_ending, ending.draining) == (False, True)


async def test_messages_that_were_delivered_before_are_counted(worker: RunningWorker) -> None:
    source = worker.worker.consumer._metrics
    worker.worker.consumer._interactive_queues.new.num_redelivered += 3
    source._read_at -= REFRESH_S
    assert (source.metrics().redelivered_interactive, source.metrics().redelivered_batch) == (3, 0)


async def test_use_of_experts_is_counted_where_there_are_some(worker: RunningWorker) -> None:
    source = worker.worker.consumer._metrics
    without = source.metrics()
    assert (without.expert_tokens, without.expert_imbalance, without.unused_experts) == (0, 0.0, 0)
    use = SimpleNamespace(tokens=5, imbalance=1.5, unused=2)
    experts: Any = SimpleNamespace(read=lambda: use)
    source._readings = replace(source._readings, experts=experts)
    # Heartbeats are more frequent than readings.
    assert source.metrics() is without
    await source.refresh()
    source._read_at -= REFRESH_S
    metrics = source.metrics()
    assert (metrics.expert_tokens, metrics.expert_imbalance, metrics.unused_experts) == (5, 1.5, 2)


async def test_what_waits_for_the_device_is_read_in_a_thread() -> None:
    threads: list[int] = []

    def read() -> ExpertLoad:
        threads.append(threading.get_ident())
        return ExpertLoad(len(threads), 1.5, 2)

    async def refresh() -> None:
        pass

    nothing: Any = SimpleNamespace(refresh=refresh)
    experts: Any = SimpleNamespace(read=read)
    source = MetricsSource(nothing, nothing, nothing, nothing, Readings(nothing, experts))
    await source.refresh()
    assert len(threads) == 2
    assert threads[1] != threading.get_ident()
    assert source._expert_load == ExpertLoad(2, 1.5, 2)
