"""The rows of what workers count, with how each is read from a heartbeat: under vLLM's names where it has them.

Each worker is a series of its own, `engine` in vLLM's words, so that a counter ends with its worker and never falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.telemetry.row import Kind, MetricRow
from shared.golden import GoldenReading
from shared.messages import Heartbeat
from shared.worker_metrics import GpuReading, KvTierReading, RankReading, WorkerMetrics

_NOTHING = GoldenReading()
ENGINE = ("model_name", "engine")
WORKER = ("model", "worker")


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A metric with one sample a worker; `read` may use both messages."""

    row: MetricRow
    read: Callable[[Heartbeat, WorkerMetrics], float]


def _usage(beat: Heartbeat) -> float:
    return max(0.0, 1.0 - beat.free_blocks / beat.total_blocks) if beat.total_blocks else 0.0


def _fill(beat: Heartbeat) -> float:
    return beat.running / beat.max_num_seqs if beat.max_num_seqs else 0.0


def _golden(metrics: WorkerMetrics) -> GoldenReading:
    return metrics.golden or _NOTHING


def _vllm(name: str, kind: Kind, text: str, read: Callable[[Heartbeat, WorkerMetrics], float]) -> WorkerRow:
    return WorkerRow(MetricRow(f"vllm:{name}", kind, ENGINE, text), read)


def _own(name: str, kind: Kind, text: str, read: Callable[[Heartbeat, WorkerMetrics], float]) -> WorkerRow:
    return WorkerRow(MetricRow(f"headrace_worker_{name}", kind, WORKER, text), read)


WORKER_ROWS = (
    _vllm("num_requests_running", "gauge", "Sequences in the worker's batch.", lambda b, m: b.running),
    _vllm("num_requests_waiting", "gauge", "Sequences that wait in the worker.", lambda b, m: b.waiting),
    _vllm("kv_cache_usage_perc", "gauge", "Share of the KV blocks in use, 0 to 1.", lambda b, m: _usage(b)),
    _vllm("gpu_cache_usage_perc", "gauge", "The same, under vLLM's earlier name.", lambda b, m: _usage(b)),
    _vllm("prompt_tokens_total", "counter", "Prompt tokens of sequences begun.", lambda b, m: m.prompt_tokens),
    _vllm("generation_tokens_total", "counter", "Tokens sampled.", lambda b, m: m.generation_tokens),
    _vllm("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", lambda b, m: m.prompt_tokens),
    _vllm("prefix_cache_hits_total", "counter", "Those found in the prefix cache.", lambda b, m: m.prefix_hits),
    _vllm("num_preemptions_total", "counter", "Running sequences that gave up blocks.", lambda b, m: m.preemptions),
    _vllm(
        "spec_decode_num_drafts_total",
        "counter",
        "Times that a sequence verified drafts in a step.",
        lambda b, m: b.spec_decode_num_drafts,
    ),
    _vllm(
        "spec_decode_num_draft_tokens_total",
        "counter",
        "Draft tokens verified.",
        lambda b, m: b.spec_decode_num_draft_tokens,
    ),
    _vllm(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Draft tokens accepted.",
        lambda b, m: b.spec_decode_num_accepted_tokens,
    ),
    _own("steps_total", "counter", "Steps of the engine: stands still where no progress is made.", lambda b, m: b.step),
    _own("failed_steps_total", "counter", "Steps that could not be computed.", lambda b, m: m.failed_steps),
    _own("prefill_tokens_total", "counter", "Prompt tokens computed, not cached.", lambda b, m: m.prefill_tokens),
    _own("evicted_blocks_total", "counter", "Blocks of the prefix cache overwritten.", lambda b, m: m.evicted_blocks),
    _own("retained_blocks", "gauge", "Blocks evicted last at present, on the device.", lambda b, m: m.retained_blocks),
    _own(
        "prefix_handovers_total",
        "counter",
        "Requests that it pulled and that went to the holder of their prefix.",
        lambda b, m: 0 if b.prefixes is None else b.prefixes.num_handovers,
    ),
    _own(
        "prefix_waits_in_vain_total",
        "counter",
        "Requests that it pulled and that waited for the holder of their prefix until their time was over.",
        lambda b, m: 0 if b.prefixes is None else b.prefixes.num_in_vain,
    ),
    _own("batch_fill", "gauge", "Running sequences over `--max-num-seqs`.", lambda b, m: _fill(b)),
    _own("running_batch", "gauge", "Running sequences of the batch lane.", lambda b, m: m.running_batch),
    _own("waiting_batch", "gauge", "Waiting sequences of the batch lane.", lambda b, m: m.waiting_batch),
    _own("dead_letters_total", "counter", "Batch jobs put into quarantine.", lambda b, m: m.dead_letters),
    _own("draining", "gauge", "1: it takes no more requests.", lambda b, m: b.draining),
    _own("start_time_seconds", "gauge", "Unix time of its start.", lambda b, m: b.started),
    _own("process_cpu_seconds_total", "counter", "Processor time of its process.", lambda b, m: m.cpu_seconds),
    _own("expert_tokens_total", "counter", "Times that an expert was given a token.", lambda b, m: m.expert_tokens),
    _own(
        "expert_imbalance",
        "gauge",
        "The most tokens of an expert over the mean of its layer, in the layer where that is most; 0 without experts.",
        lambda b, m: m.expert_imbalance,
    ),
    _own("unused_experts", "gauge", "Experts that no token went to, over all layers.", lambda b, m: m.unused_experts),
    _own("golden_probes_total", "counter", "Golden probes that ended.", lambda b, m: _golden(m).probes),
    _own("golden_failures_total", "counter", "Those that differed from the baseline.", lambda b, m: _golden(m).failed),
    _own("golden_given_up_total", "counter", "Those that did not end in time.", lambda b, m: _golden(m).given_up),
    _own("golden_deviation", "gauge", "Of the last golden probe.", lambda b, m: _golden(m).deviation),
    _own("golden_limit", "gauge", "Deviation from which a golden probe fails.", lambda b, m: _golden(m).limit),
    _own("golden_failures_in_a_row", "gauge", "Since a golden probe passed.", lambda b, m: _golden(m).in_a_row),
    _own("golden_device_seconds_total", "counter", "What golden probes took.", lambda b, m: _golden(m).device_s),
    _own("golden_age_seconds", "gauge", "Since a golden probe ended.", lambda b, m: _golden(m).age_s or 0.0),
    _own("golden_withdrawn", "gauge", "1: it takes nothing because of them.", lambda b, m: _golden(m).has_withdrawn),
    _own("process_resident_memory_bytes", "gauge", "Memory of its process.", lambda b, m: m.resident_bytes),
)
STEP_TOKENS_ROW = MetricRow("vllm:iteration_tokens_total", "histogram", ENGINE, "Tokens of each step.")
STEP_SECONDS_ROW = MetricRow("headrace_worker_step_seconds", "histogram", WORKER, "How long each step took.")
CONFIG_ROW = MetricRow(
    "vllm:cache_config_info", "gauge", (*ENGINE, "block_size", "num_gpu_blocks"), "Always 1; the labels tell the sizes."
)
ROLE_ROW = MetricRow(
    "headrace_worker_role_info", "gauge", (*WORKER, "role"), "Always 1; the label tells its role: `none` without one."
)
REDELIVERIES_ROW = MetricRow(
    "headrace_worker_redeliveries_total", "counter", (*WORKER, "lane"), "Requests that NATS had delivered before."
)
KV_USED_ROW = MetricRow(
    "headrace_worker_kv_used_blocks", "gauge", (*WORKER, "group"), "KV blocks in use, by kind of memory."
)
KV_TOTAL_ROW = MetricRow("headrace_worker_kv_blocks", "gauge", (*WORKER, "group"), "KV blocks, by kind of memory.")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartRow(Generic[T]):
    """A metric with one sample for each GPU, rank or tier of a worker; None where a device does not tell."""

    row: MetricRow
    read: Callable[[T], float | None]


def _parts(prefix: str, label: str, *rows: tuple[str, Kind, str, Callable[[T], float | None]]) -> list[PartRow[T]]:
    labels = (*WORKER, label)
    return [
        PartRow(MetricRow(f"headrace_{prefix}_{name}", kind, labels, text), read) for name, kind, text, read in rows
    ]


GPU_ROWS: list[PartRow[GpuReading]] = _parts(
    "gpu",
    "gpu",
    ("utilization_ratio", "gauge", "Share of time in which a kernel ran, by NVML.", lambda g: g.utilization),
    ("memory_used_bytes", "gauge", "Memory in use on the GPU, by NVML.", lambda g: g.memory_used_bytes),
    ("memory_total_bytes", "gauge", "Memory of the GPU, by NVML.", lambda g: g.memory_total_bytes),
    ("temperature_celsius", "gauge", "Temperature of the GPU, by NVML.", lambda g: g.temperature_celsius),
    ("power_watts", "gauge", "Power that the GPU draws, by NVML.", lambda g: g.power_watts),
    ("energy_joules_total", "counter", "Energy of the GPU since the driver was loaded.", lambda g: g.energy_j),
)


RANK_ROWS: list[PartRow[RankReading]] = _parts(
    "worker_rank",
    "rank",
    ("alive", "gauge", "1: it computes, or waits for a step; 0: it is gone or loads.", lambda r: r.is_alive),
    ("last_step", "gauge", "Step that it computed last: one behind the others is stuck.", lambda r: r.step),
    ("silent_seconds", "gauge", "Time since it showed last that it runs.", lambda r: r.silent_s),
    ("loads_total", "counter", "Times that its weights were read: once a process.", lambda r: r.loads),
)


TIER_ROWS: list[PartRow[KvTierReading]] = _parts(
    "worker_kv_tier",
    "tier",
    ("hit_tokens_total", "counter", "Prompt tokens found on the device or in a tier below.", lambda t: t.hit_tokens),
    ("used_bytes", "gauge", "Contents of the KV cache that the tier keeps.", lambda t: t.used_bytes),
    ("limit_bytes", "gauge", "What it may keep.", lambda t: t.total_bytes),
    ("stored_bytes_total", "counter", "Written to the tier.", lambda t: t.stored_bytes),
    ("loaded_bytes_total", "counter", "Read from the tier.", lambda t: t.loaded_bytes),
    ("evicted_blocks_total", "counter", "Blocks that made room for others.", lambda t: t.evicted),
    ("dropped_blocks_total", "counter", "Blocks not kept: too many were on their way.", lambda t: t.dropped),
    ("refused_blocks_total", "counter", "Blocks that failed verification.", lambda t: t.refused),
    ("failures_total", "counter", "Reads and writes that failed.", lambda t: t.failed),
    ("retained_bytes", "gauge", "Contents that are evicted last at present.", lambda t: t.retained_bytes),
)
EVERY_ROW = (
    *(entry.row for entry in WORKER_ROWS),
    *(STEP_TOKENS_ROW, STEP_SECONDS_ROW, CONFIG_ROW, ROLE_ROW, REDELIVERIES_ROW, KV_USED_ROW, KV_TOTAL_ROW),
    *(entry.row for entry in GPU_ROWS),
    *(entry.row for entry in RANK_ROWS),
    *(entry.row for entry in TIER_ROWS),
)
