"""A worker's own counts, which its heartbeats carry to the gateways, which show them to Prometheus.

Counters grow from the worker's start. Histograms are counts per bucket; the upper bounds stand here, because both sides
must have the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from shared.bounds import Counter, NumBlocks, NumRequests
from shared.golden import GoldenReading


class Histogram:
    """Counts per bucket and their sum; `observe` is one bisection and three additions. One thread writes it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, which occurred `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts under their upper bounds, as Prometheus wants them."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative counts under their upper bounds; there is one count more than bounds."""
    labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
    so_far = 0
    result: list[tuple[str, float]] = []
    for label, count in zip(labels, counts, strict=True):
        so_far += count
        result.append((label, so_far))
    return result


STEP_TOKENS_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
STEP_SECONDS_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MAX_GPUS = 64
MAX_KV_GROUPS = 32
MAX_KV_TIERS = 4
MAX_RANKS = 64

# More than any figure of these can be.
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
ShortName = Annotated[str, Meta(max_length=64)]


class HistogramCounts(Struct, frozen=True, array_like=True):
    """A histogram: one count per bucket, not cumulative, and the sum of the values."""

    counts: Annotated[tuple[Counter, ...], Meta(max_length=64)]
    total: Amount


class GpuReading(Struct, frozen=True, array_like=True):
    """NVML readings of one GPU; None where the device has no such reading.

    Attributes:
        name: Its UUID.
        utilization: Share of the last moment in which a kernel ran, from 0 to 1.
        energy_j: Joules since the driver was loaded.
    """

    name: ShortName
    utilization: Amount | None = None
    memory_used_bytes: Counter | None = None
    memory_total_bytes: Counter | None = None
    temperature_celsius: Amount | None = None
    power_watts: Amount | None = None
    energy_j: Amount | None = None


class KvGroup(Struct, frozen=True, array_like=True):
    """Blocks of one kind of KV memory."""

    name: ShortName
    used_blocks: NumBlocks
    total_blocks: NumBlocks


class KvTierReading(Struct, frozen=True, array_like=True):
    """One tier of the KV cache below the device's memory.

    Attributes:
        name: `host`, `disk` or `bucket`.
        hit_tokens: Prompt tokens that were brought back from there.
        stored_bytes, loaded_bytes: Written and read so far.
        dropped: Contents that were not kept because too many were on their way.
        evicted: Contents that made room for others.
        refused: Contents that failed verification.
        failed: Reads and writes that failed.
        retained_bytes: Contents that are evicted last at present.
    """

    name: ShortName
    used_bytes: Counter = 0
    total_bytes: Counter = 0
    hit_tokens: Counter = 0
    stored_bytes: Counter = 0
    loaded_bytes: Counter = 0
    dropped: Counter = 0
    evicted: Counter = 0
    refused: Counter = 0
    failed: Counter = 0
    retained_bytes: Counter = 0


class RankReading(Struct, frozen=True, array_like=True):
    """State of one rank of a worker whose model is divided.

    Attributes:
        rank: Its number.
        is_alive: Its process exists and shows signs of life; rank 0 is the worker itself.
        step: Last step that it computed.
        silent_s: Seconds since its last sign of life.
        loads: How often its part of the weights was read: more than once if its process was replaced.
    """

    rank: NumRequests
    is_alive: bool
    step: Counter
    silent_s: Amount
    loads: Counter


class WorkerMetrics(Struct, frozen=True, array_like=True):
    """A worker's counts since its start, and its current state.

    Attributes:
        prompt_tokens: Tokens of started sequences, including those found in the prefix cache.
        prefix_hits: Prompt tokens found there.
        prefill_tokens: Prompt tokens computed; again after a preemption.
        generation_tokens: Tokens sampled.
        preemptions: Times that a running sequence gave its blocks back.
        failed_steps: Steps that the model runner did not compute.
        step_tokens: Tokens of each step.
        step_seconds: How long each step took.
        running_batch, waiting_batch: Sequences of the batch lane, which the heartbeat counts with all others.
        batch_pending: Jobs left in the batch queues, as of the last deliveries.
        batch_oldest_s: Age of the oldest job in these queues that is not finished.
        redelivered_interactive, redelivered_batch: Messages that NATS had delivered before.
        dead_letters: Batch jobs that were put into quarantine.
        cpu_seconds: Processor time of the worker's process.
        resident_bytes: Its memory.
        gpus: Its GPUs; none on a CPU, or where NVML cannot be asked.
        kv_groups: The KV cache by kinds of memory.
        expert_tokens: Times that an expert of a mixture was given a token, over all layers.
        expert_imbalance: Largest ratio, over all layers, of an expert's tokens to its layer's mean; 0 without experts.
        unused_experts: Experts, over all layers, that got no token.
        evicted_blocks: Blocks of the prefix cache that were overwritten, because blocks were needed.
        ranks: The ranks that share the model; empty where one process has it all.
        kv_tiers: Lower tiers of the KV cache; empty without any.
        golden: Results of golden probes; None without a baseline.
        device_hits: Those of `prefix_hits` that no tier had to load.
        retained_blocks: Blocks that are evicted last at present.
    """

    prompt_tokens: Counter = 0
    prefix_hits: Counter = 0
    prefill_tokens: Counter = 0
    generation_tokens: Counter = 0
    preemptions: Counter = 0
    failed_steps: Counter = 0
    step_tokens: HistogramCounts | None = None
    step_seconds: HistogramCounts | None = None
    running_batch: NumRequests = 0
    waiting_batch: NumRequests = 0
    batch_pending: NumRequests = 0
    batch_oldest_s: Amount = 0.0
    redelivered_interactive: Counter = 0
    redelivered_batch: Counter = 0
    dead_letters: Counter = 0
    cpu_seconds: Amount = 0.0
    resident_bytes: Counter = 0
    gpus: Annotated[tuple[GpuReading, ...], Meta(max_length=MAX_GPUS)] = ()
    kv_groups: Annotated[tuple[KvGroup, ...], Meta(max_length=MAX_KV_GROUPS)] = ()
    expert_tokens: Counter = 0
    expert_imbalance: Amount = 0.0
    unused_experts: Counter = 0
    evicted_blocks: Counter = 0
    ranks: Annotated[tuple[RankReading, ...], Meta(max_length=MAX_RANKS)] = ()
    kv_tiers: Annotated[tuple[KvTierReading, ...], Meta(max_length=MAX_KV_TIERS)] = ()
    golden: GoldenReading | None = None
    device_hits: Counter = 0
    retained_blocks: Counter = 0


class StepCounts:
    """Totals of landed steps since the start. The engine's thread writes them; others may read them.

    Each attribute is a field of `WorkerMetrics`.
    """

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.generation_tokens = 0
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self.step_seconds = Histogram(STEP_SECONDS_BOUNDS)

    def observe(self, num_tokens: int, num_prefilled: int, num_generated: int, duration_s: float) -> None:
        """Add one step of a number of tokens, drafts not counted."""
        self.prefill_tokens += num_prefilled
        self.generation_tokens += num_generated
        self.step_tokens.observe(num_tokens)
        self.step_seconds.observe(duration_s)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `WorkerMetrics` that are counted here."""
        return {
            name: HistogramCounts(tuple(value.counts), value.total) if isinstance(value, Histogram) else value
            for name, value in vars(self).items()
        }
