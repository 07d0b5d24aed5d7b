"""The fleet for Prometheus: each figure once, however many gateways know it."""

from __future__ import annotations

import msgspec
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_collector import MAX_MODELS, MAX_WORKER_SAMPLES, FleetCollector
from gateway.fleet.fleet_load import OwnRequests
from gateway.fleet.liveness import FleetLimits
from gateway.metrics import make_registry
from gateway.telemetry.stream_watch import StreamState, UsageWatch
from shared.hosted_models import HostBeat, HostedModel
from shared.messages import GatewayHeartbeat, Heartbeat
from shared.worker_metrics import (
    STEP_TOKENS_BOUNDS,
    GpuReading,
    HistogramCounts,
    KvGroup,
    KvTierReading,
    RankReading,
    WorkerMetrics,
)
from tests.gateway.fleet.test_fleet import BEAT
from tests.gateway.fleet.test_worker_needs import needs_of

COUNTS = WorkerMetrics(
    prompt_tokens=100,
    prefix_hits=40,
    generation_tokens=70,
    step_tokens=HistogramCounts((1,) * (len(STEP_TOKENS_BOUNDS) + 1), 500.0),
    step_seconds=HistogramCounts((1, 2), 3.0),
    waiting_batch=1,
    batch_pending=6,
    batch_oldest_s=33.0,
    redelivered_batch=2,
    gpus=(GpuReading("GPU-1", utilization=0.5, energy_j=1000.0),),
    kv_groups=(KvGroup("full", 9, 10), KvGroup("window", 1, 10)),
)


class Streams:
    def __init__(self) -> None:
        self.states = {"HR_DEAD": StreamState(3, 99)}


USAGE = UsageWatch(None, lambda: False)  # type: ignore[arg-type]


def fleet(name: str, started: float, *beats: Heartbeat) -> Fleet:
    fleet = Fleet(name, FleetLimits(), OwnRequests(lambda model: (0, 0), lambda: {"m": (9, 900)}))
    fleet.started = started
    fleet.sweep(0.0)
    for beat in beats:
        fleet.note_heartbeat(beat, 0.0)
    return fleet


def scrape(fleet: Fleet) -> dict[tuple[str, ...], float]:
    """Return values by the sample's name and the values of its labels, in the order of their names."""
    needs = needs_of(fleet)
    needs.look(0.0)
    collector = FleetCollector(fleet, lambda: {"m": 4.0}, Streams(), USAGE, needs, 2)  # type: ignore[arg-type]
    families = text_string_to_metric_families(generate_latest(make_registry(collector)).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(value for _, value in sorted(s.labels.items()))): s.value for s in samples}


def beats(*names: str) -> list[Heartbeat]:
    return [msgspec.structs.replace(BEAT, worker=name, metrics=COUNTS) for name in names]


def test_each_worker_is_a_series_of_its_own() -> None:
    values = scrape(fleet("gw", 1.0, *beats("w1", "w2")))
    assert values["vllm:generation_tokens_total", "w1", "m"] == 70
    assert values["vllm:generation_tokens_total", "w2", "m"] == 70
    assert values["vllm:kv_cache_usage_perc", "w1", "m"] == 0.9
    assert values["headrace_gpu_energy_joules_total", "GPU-1", "m", "w1"] == 1000
    assert ("headrace_gpu_power_watts", "GPU-1", "m", "w1") not in values
    assert values["headrace_worker_kv_used_blocks", "window", "m", "w2"] == 1
    assert values["headrace_worker_kv_blocks", "window", "m", "w2"] == 10
    assert values["headrace_worker_role_info", "m", "none", "w2"] == 1
    assert values["headrace_worker_redeliveries_total", "batch", "m", "w2"] == 2
    assert values["vllm:iteration_tokens_total_count", "w1", "m"] == len(STEP_TOKENS_BOUNDS) + 1
    assert values["headrace_stream_messages", "HR_DEAD"] == 3


def test_queue_has_depth_and_age_by_lane() -> None:
    values = scrape(fleet("gw", 1.0, *beats("w1", "w2")))
    # Each worker has two waiting sequences, one of them of the batch lane; the queue is seen by both.
    assert values["headrace_queue_depth", "interactive", "m"] == 2
    # Of the lanes of a model with two workers that compute nothing.
    assert values["headrace_fleet_workers_needed", "interactive", "m"] == 1
    assert values["headrace_fleet_workers_needed", "batch", "m"] == 1
    assert values["headrace_queue_depth", "batch", "m"] == 2 + 6
    assert values["headrace_queue_oldest_seconds", "interactive", "m", "2"] == 4
    assert values["headrace_queue_oldest_seconds", "batch", "m", "2"] == 33


def test_oldest_gateway_alone_shows_the_fleet() -> None:
    older, younger = fleet("b", 1.0, *beats("w1")), fleet("a", 2.0, *beats("w1"))
    for one, name, started in ((older, "a", 2.0), (younger, "b", 1.0)):
        one.note_gateway_heartbeat(
            GatewayHeartbeat(gateway=name, unclaimed=0, unclaimed_tokens=0, started=started), 0.0
        )
    assert ("vllm:num_requests_running", "w1", "m") in scrape(older)
    # What it alone knows it shows all the same.
    assert scrape(younger) == {("headrace_queue_oldest_seconds", "interactive", "m", "2"): 4.0}


def test_gateway_that_outlives_the_oldest_shows_the_fleet() -> None:
    younger = fleet("a", 2.0, *beats("w1"))
    younger.note_gateway_heartbeat(GatewayHeartbeat(gateway="b", unclaimed=0, unclaimed_tokens=0, started=1.0), 0.0)
    assert not younger.is_eldest
    younger.sweep(60.0)
    assert younger.is_eldest


def test_worker_of_a_version_without_metrics_or_with_other_buckets_is_shown() -> None:
    values = scrape(fleet("gw", 1.0, BEAT, *beats("w2")))
    assert values["vllm:num_requests_running", "w1", "m"] == 1
    assert ("headrace_worker_step_seconds_count", "m", "w2") not in values


def test_figures_that_no_worker_can_have_do_not_end_the_scrape() -> None:
    liar = msgspec.structs.replace(BEAT, worker="liar", max_num_seqs=0, free_blocks=2**31 - 1, total_blocks=1)
    values = scrape(fleet("gw", 1.0, liar, *beats("w1")))
    assert values["headrace_worker_batch_fill", "m", "liar"] == 0
    assert values["vllm:kv_cache_usage_perc", "liar", "m"] == 0
    assert values["vllm:num_requests_running", "w1", "m"] == 1


def test_name_that_a_worker_repeats_is_shown_once() -> None:
    twice = WorkerMetrics(
        gpus=(GpuReading("g", utilization=0.5), GpuReading("g", utilization=0.7)),
        ranks=(RankReading(1, True, 5, 0.0, 1), RankReading(1, False, 6, 0.0, 1)),
        kv_groups=(KvGroup("full", 1, 10), KvGroup("full", 2, 10)),
    )
    watched = fleet("gw", 1.0, msgspec.structs.replace(BEAT, metrics=twice))
    collector = FleetCollector(
        watched,
        lambda: {"m": 4.0},
        Streams(),  # type: ignore[arg-type]
        USAGE,
        needs_of(watched),
        2,
    )
    lines = generate_latest(make_registry(collector)).decode().splitlines()
    assert [line for line in lines if line.startswith("headrace_gpu_utilization_ratio{")] == [
        'headrace_gpu_utilization_ratio{gpu="g",model="m",worker="w1"} 0.5'
    ]
    assert [line.rpartition(" ")[2] for line in lines if line.startswith("headrace_worker_kv_used_blocks{")] == ["1.0"]
    assert [line for line in lines if line.startswith("headrace_worker_rank_last_step{")] == [
        'headrace_worker_rank_last_step{model="m",rank="1",worker="w1"} 5.0'
    ]


def test_scrape_is_bounded_and_shows_those_that_were_heard_first() -> None:
    many = WorkerMetrics(gpus=tuple(GpuReading(f"g{i}", *(1,) * 6) for i in range(64)))
    liars = (msgspec.structs.replace(BEAT, worker=f"liar{i}", model=f"of{i % 600}", metrics=many) for i in range(1000))
    values = scrape(fleet("gw", 1.0, *beats("w1"), *liars))
    assert len(values) < MAX_WORKER_SAMPLES + 2 * len(STEP_TOKENS_BOUNDS) + 12 * MAX_MODELS
    assert values["vllm:generation_tokens_total", "w1", "m"] == 70
    assert values["headrace_fleet_workers", "m"] == 1


def test_each_part_of_a_worker_is_shown_and_a_reading_of_nothing_too() -> None:
    parts = WorkerMetrics(
        gpus=(GpuReading("g0", utilization=0.0), GpuReading("g1", utilization=0.5)),
        ranks=(RankReading(0, True, 5, 0.0, 1), RankReading(1, False, 6, 0.0, 1)),
    )
    values = scrape(fleet("gw", 1.0, msgspec.structs.replace(BEAT, metrics=parts)))
    shown = {key[1]: value for key, value in values.items() if key[0] == "headrace_gpu_utilization_ratio"}
    assert shown == {"g0": 0.0, "g1": 0.5}
    assert [value for key, value in values.items() if key[0] == "headrace_worker_rank_last_step"] == [5, 6]
    assert not [key for key in values if key[0] == "headrace_gpu_power_watts"]


def test_hits_of_the_device_stand_beside_those_of_the_tiers_and_it_has_no_other_figure_of_one() -> None:
    # One that lies calls a tier as the device.
    tiers = tuple(KvTierReading(name, 5, 50, hit_tokens=hits) for name, hits in (("host", 10), ("device", 99)))
    told = WorkerMetrics(prefix_hits=40, device_hits=30, kv_tiers=tiers)
    values = scrape(fleet("gw", 1.0, msgspec.structs.replace(BEAT, metrics=told)))
    shown = {key: value for key, value in values.items() if key[0].startswith("headrace_worker_kv_tier_")}
    hits = {key[2:]: shown.pop(key) for key in list(shown) if key[0].endswith("_hit_tokens_total")}
    assert sorted(hits.values()) == [10, 30], hits
    assert values["headrace_worker_kv_tier_hit_tokens_total", "m", "device", "w1"] == 30
    assert shown["headrace_worker_kv_tier_used_bytes", "m", "host", "w1"] == 5
    assert not [key for key in shown if "device" in key]


def test_models_of_hosts_are_shown_with_their_state_and_a_scrape_of_them_is_bounded() -> None:
    found = fleet("gw", 1.0, BEAT)
    slept = HostedModel(name="a", path="/a", state="asleep", on_demand=True, load_s=2.5, wakes=3)
    found.note_host_beat(
        HostBeat(host="h", models=(slept, HostedModel(name="b", path="/b", state="loading", on_demand=False))), 0.0
    )
    samples = scrape(found)
    assert samples["headrace_hosted_model_state", "h", "a", "asleep"] == 1
    assert samples["headrace_hosted_model_state", "h", "b", "loading"] == 1
    assert samples["headrace_hosted_model_wakes_total", "h", "a"] == 3
    assert samples["headrace_hosted_model_load_seconds", "h", "a"] == 2.5
    assert ("headrace_hosted_model_load_seconds", "h", "b") not in samples
    for number in range(4):
        models = tuple(HostedModel(name=f"x{index}", path="/x", state="asleep", on_demand=True) for index in range(200))
        found.note_host_beat(HostBeat(host=f"many-{number}", models=models), 0.0)
    names = [name for name, *_ in scrape(found)]
    assert names.count("headrace_hosted_model_state") == MAX_MODELS
