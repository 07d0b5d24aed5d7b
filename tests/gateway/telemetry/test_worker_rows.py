"""Each metric of a worker shows the figure that it is named after."""

from __future__ import annotations

import msgspec
import pytest

from gateway.telemetry.worker_rows import EVERY_ROW, GPU_ROWS, RANK_ROWS, TIER_ROWS, WORKER_ROWS
from shared.golden import GoldenReading
from shared.messages import Heartbeat
from shared.prefixes import PrefixNews
from shared.worker_metrics import GpuReading, KvTierReading, RankReading, WorkerMetrics
from tests.gateway.fleet.test_fleet import BEAT

METRICS = WorkerMetrics(
    prompt_tokens=101,
    prefix_hits=102,
    prefill_tokens=103,
    generation_tokens=104,
    preemptions=105,
    failed_steps=106,
    running_batch=107,
    waiting_batch=108,
    dead_letters=109,
    cpu_seconds=110.5,
    resident_bytes=111,
    expert_tokens=112,
    expert_imbalance=1.13,
    unused_experts=114,
    evicted_blocks=115,
    retained_blocks=124,
    golden=GoldenReading(116, 117, 118, 1.19, 1.2, 121.0, 122, True, "", 123.0),
)
BUSY = msgspec.structs.replace(
    BEAT,
    running=2,
    waiting=3,
    step=204,
    free_blocks=25,
    total_blocks=100,
    max_num_seqs=8,
    draining=True,
    started=205.0,
    spec_decode_num_drafts=206,
    spec_decode_num_draft_tokens=207,
    spec_decode_num_accepted_tokens=208,
    prefixes=PrefixNews(num_handovers=209, num_in_vain=210),
)
EXPECTED = {
    "vllm:num_requests_running": 2,
    "vllm:num_requests_waiting": 3,
    "vllm:kv_cache_usage_perc": 0.75,
    "vllm:gpu_cache_usage_perc": 0.75,
    "vllm:prompt_tokens_total": 101,
    "vllm:generation_tokens_total": 104,
    "vllm:prefix_cache_queries_total": 101,
    "vllm:prefix_cache_hits_total": 102,
    "vllm:num_preemptions_total": 105,
    "vllm:spec_decode_num_drafts_total": 206,
    "vllm:spec_decode_num_draft_tokens_total": 207,
    "vllm:spec_decode_num_accepted_tokens_total": 208,
    "headrace_worker_steps_total": 204,
    "headrace_worker_failed_steps_total": 106,
    "headrace_worker_prefill_tokens_total": 103,
    "headrace_worker_batch_fill": 0.25,
    "headrace_worker_running_batch": 107,
    "headrace_worker_waiting_batch": 108,
    "headrace_worker_dead_letters_total": 109,
    "headrace_worker_draining": 1,
    "headrace_worker_start_time_seconds": 205,
    "headrace_worker_process_cpu_seconds_total": 110.5,
    "headrace_worker_expert_tokens_total": 112,
    "headrace_worker_expert_imbalance": 1.13,
    "headrace_worker_unused_experts": 114,
    "headrace_worker_evicted_blocks_total": 115,
    "headrace_worker_retained_blocks": 124,
    "headrace_worker_prefix_handovers_total": 209,
    "headrace_worker_prefix_waits_in_vain_total": 210,
    "headrace_worker_golden_probes_total": 116,
    "headrace_worker_golden_failures_total": 117,
    "headrace_worker_golden_failures_in_a_row": 118,
    "headrace_worker_golden_deviation": 1.19,
    "headrace_worker_golden_limit": 1.2,
    "headrace_worker_golden_device_seconds_total": 121.0,
    "headrace_worker_golden_given_up_total": 122,
    "headrace_worker_golden_age_seconds": 123.0,
    "headrace_worker_golden_withdrawn": 1,
    "headrace_worker_process_resident_memory_bytes": 111,
}


def shown(beat: Heartbeat, metrics: WorkerMetrics) -> dict[str, float]:
    return {entry.row.name: entry.read(beat, metrics) for entry in WORKER_ROWS}


def test_each_figure_is_shown_under_its_own_name() -> None:
    assert shown(BUSY, METRICS) == EXPECTED


@pytest.mark.parametrize(
    ("free", "total", "usage"), [(0, 0, 0.0), (0, 10, 1.0), (10, 10, 0.0), (11, 10, 0.0), (1, 1, 0.0), (0, 1, 1.0)]
)
def test_share_of_blocks_in_use_is_from_0_to_1(free: int, total: int, usage: float) -> None:
    beat = msgspec.structs.replace(BUSY, free_blocks=free, total_blocks=total)
    assert shown(beat, METRICS)["vllm:kv_cache_usage_perc"] == usage


@pytest.mark.parametrize(("running", "most", "fill"), [(2, 0, 0.0), (1, 1, 1.0), (0, 4, 0.0), (4, 4, 1.0)])
def test_fill_of_a_batch_is_over_the_most_that_it_may_have(running: int, most: int, fill: float) -> None:
    beat = msgspec.structs.replace(BUSY, running=running, max_num_seqs=most)
    assert shown(beat, METRICS)["headrace_worker_batch_fill"] == fill


def test_each_reading_of_a_gpu_is_shown_under_its_own_name() -> None:
    reading = GpuReading("g", 0.5, 1, 2, 3.0, 4.0, 5.0)
    assert {entry.row.name: entry.read(reading) for entry in GPU_ROWS} == {
        "headrace_gpu_utilization_ratio": 0.5,
        "headrace_gpu_memory_used_bytes": 1,
        "headrace_gpu_memory_total_bytes": 2,
        "headrace_gpu_temperature_celsius": 3.0,
        "headrace_gpu_power_watts": 4.0,
        "headrace_gpu_energy_joules_total": 5.0,
    }
    assert {entry.read(GpuReading("g")) for entry in GPU_ROWS} == {None}


def test_each_reading_of_a_rank_is_shown_under_its_own_name() -> None:
    reading = RankReading(3, True, 4, 0.5, 6)
    assert {entry.row.name: entry.read(reading) for entry in RANK_ROWS} == {
        "headrace_worker_rank_alive": 1,
        "headrace_worker_rank_last_step": 4,
        "headrace_worker_rank_silent_seconds": 0.5,
        "headrace_worker_rank_loads_total": 6,
    }


def test_each_reading_of_a_tier_is_shown_under_its_own_name() -> None:
    reading = KvTierReading("disk", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert {entry.row.name.removeprefix("headrace_worker_kv_tier_"): entry.read(reading) for entry in TIER_ROWS} == {
        "used_bytes": 1,
        "limit_bytes": 2,
        "hit_tokens_total": 3,
        "stored_bytes_total": 4,
        "loaded_bytes_total": 5,
        "dropped_blocks_total": 6,
        "evicted_blocks_total": 7,
        "refused_blocks_total": 8,
        "failures_total": 9,
        "retained_bytes": 10,
    }


def test_labels_tell_workers_apart_in_the_words_of_their_dashboards() -> None:
    for row in EVERY_ROW:
        expected = ("model_name", "engine") if row.name.startswith("vllm:") else ("model", "worker")
        assert row.labels[:2] == expected
    assert all(entry.row.labels == ("model", "worker", "gpu") for entry in GPU_ROWS)


def test_help_of_every_metric_is_a_sentence() -> None:
    for row in [*EVERY_ROW, *(entry.row for entry in GPU_ROWS)]:
        assert " " in row.text
        assert row.text.endswith(".")
        assert row.family().documentation == row.text
