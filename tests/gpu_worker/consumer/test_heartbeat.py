"""What a worker counts of itself, as its heartbeats tell.

Readings of a GPU, by the real NVML binding over a driver library that the test builds; no GPU is needed.

What workers hear of the service that tenants have had elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.consumer.gpu_monitor import GpuMonitor
from gpu_worker.consumer.heartbeat import REFRESH_S, MetricsSource, Readings
from gpu_worker.consumer.peer_services import ADOPT_S, GatewayServiceBeat, PeerServices
from gpu_worker.consumer.prefixes.peers import PeerBeat
from gpu_worker.core.fleet_service import HeardServices
from gpu_worker.layers.mixture import ExpertLoad
from shared.messages import GatewayHeartbeat, Heartbeat, encode
from shared.sampling import Sampling
from shared.services import TenantService
from shared.subjects import gateway_subject
from shared.worker_metrics import STEP_SECONDS_BOUNDS, STEP_TOKENS_BOUNDS
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway


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


# Enough of the driver's interface for two devices, one of which cannot tell anything.
DRIVER = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
static int device, mute;
#define IF_TOLD if (handle == &mute) return 3;
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { return 0; }
const char* nvmlErrorString(int result) { return "driver error"; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  if (strcmp(uuid, "GPU-1234") != 0 && strcmp(uuid, "GPU-mute") != 0) return 6;
  *handle = strcmp(uuid, "GPU-mute") ? &device : &mute;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void* handle, Utilization* out) {
  IF_TOLD out->gpu = 42; out->memory = 7; return 0;
}
int nvmlDeviceGetMemoryInfo(void* handle, Memory* out) {
  IF_TOLD out->total = 1000; out->used = 600; return 0;
}
int nvmlDeviceGetTemperature(void* handle, int sensor, unsigned int* out) {
  IF_TOLD *out = sensor == 0 ? 65 : 99; return 0;
}
int nvmlDeviceGetPowerUsage(void* handle, unsigned int* out) { IF_TOLD *out = 250500; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* out) {
  IF_TOLD *out = 123456; return 0;
}
"""
READ = """
import asyncio, json, sys
import msgspec
from gpu_worker.consumer.gpu_monitor import GpuMonitor
async def main():
    monitor = GpuMonitor(sys.argv[1])
    await monitor.refresh()
    await monitor.refresh()
    print(json.dumps(msgspec.to_builtins(monitor.readings)))
asyncio.run(main())
"""


def read(uuid: str, library: Path | None) -> tuple[list[list[object]], str]:
    environ = dict(os.environ)
    if library is not None:
        environ["LD_LIBRARY_PATH"] = str(library)
    ran = subprocess.run([sys.executable, "-c", READ, uuid], env=environ, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout), ran.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")]
    subprocess.run(command, check=True)
    return folder


def test_device_is_read_and_what_it_cannot_tell_is_none(library: Path) -> None:
    readings, log = read("GPU-1234", library)
    assert readings == [["GPU-1234", 0.42, 600, 1000, 65.0, 250.5, 123.456]]
    assert log == ""
    readings, log = read("GPU-mute", library)
    assert readings == [["GPU-mute", None, None, None, None, None, None]]
    assert log == ""


def test_unknown_device_is_told_once_and_has_no_readings(library: Path) -> None:
    readings, log = read("GPU-9", library)
    assert readings == []
    assert log.count("no metrics of the GPU: NVML:") == 1


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="has a driver")
def test_machine_without_a_driver_has_no_readings() -> None:
    readings, log = read("GPU-1234", None)
    assert readings == []
    assert log.count("no metrics of the GPU: NVML:") == 1


async def test_worker_on_a_cpu_asks_nobody() -> None:
    monitor = GpuMonitor(None)
    await monitor.refresh()
    assert monitor.readings == ()


class Listener:
    def __init__(self) -> None:
        self.services, self.now = PeerServices("m", 0.0), ADOPT_S

    def hear(self, worker: str = "w", started: float = 1.0, ahead: float = 0.0, **served: float) -> None:
        told = tuple(TenantService(tenant, tokens, ahead) for tenant, tokens in served.items())
        self.services.note(PeerBeat(worker=worker, started=started, services={"interactive": told}), self.now)

    def hear_gateway(self, gateway: str, model: str, **ahead: float) -> None:
        told = tuple(TenantService(tenant, 0.0, tokens) for tenant, tokens in ahead.items())
        self.services.note_gateway(GatewayServiceBeat(gateway=gateway, services={model: {"batch": told}}), self.now)

    def taken(self) -> HeardServices:
        return self.services.take().get("interactive", HeardServices())


def test_sums_tell_what_was_served_meanwhile_although_heartbeats_are_lost() -> None:
    listener = Listener()
    listener.hear(a=1000.0)
    assert listener.taken().served == {}
    listener.hear(a=1010.0, b=5.0)
    listener.hear("other", a=70.0)
    # Two of its heartbeats are lost.
    listener.hear(a=1040.0)
    listener.hear("other", a=71.0)
    assert listener.taken().served == {"a": 41.0, "b": 5.0}
    assert listener.taken().served == {}
    # A tenant that was among too many to be told of.
    listener.hear(b=8.0)
    assert listener.taken().served == {"b": 3.0}


def test_worker_that_was_restarted_counts_from_nothing() -> None:
    listener = Listener()
    listener.hear(a=1000.0)
    listener.hear(started=2.0, a=5000.0)
    listener.hear(started=2.0, a=5001.0)
    assert listener.taken().served == {"a": 1.0}


def test_how_far_tenants_are_ahead_is_taken_over_once_of_each_teller_after_the_start() -> None:
    listener = Listener()
    listener.now = 1.0
    listener.hear("one", ahead=10.0, a=1.0)
    listener.hear("two", ahead=30.0, a=1.0)
    listener.hear("two", ahead=50.0, a=1.0)
    listener.hear_gateway("g", "m", a=7.0)
    listener.hear_gateway("h", "another", a=9.0)
    taken = listener.services.take()
    assert taken["interactive"].ahead == {"a": 30.0}
    assert taken["batch"].ahead == {"a": 7.0}
    listener.now = ADOPT_S
    listener.hear("three", ahead=90.0, a=1.0)
    listener.hear_gateway("i", "m", a=9.0)
    assert listener.services.take() == {}


async def test_worker_that_starts_takes_over_what_a_gateway_tells_and_tells_what_it_serves(
    worker: RunningWorker, make_worker: MakeWorker, gateway: TestGateway, model: str
) -> None:
    def ahead_of(beat: Heartbeat) -> dict[str, float]:
        return {service.tenant: service.ahead for service in beat.services.get("interactive", ())}

    told = GatewayHeartbeat(
        gateway="teller",
        unclaimed=0,
        unclaimed_tokens=0,
        services={model: {"interactive": (TenantService("heavy", 0.0, 5000.0),)}},
    )
    second = await make_worker()
    await gateway.nats.publish(gateway_subject("teller"), encode(told))
    await second.wait_for_heartbeat(lambda beat: ahead_of(beat).get("heavy") == 5000.0)
    await gateway.ask("x = 1", tenant="light", sampling=Sampling(max_tokens=7, ignore_eos=True))

    def has_served(beat: Heartbeat) -> bool:
        return any(each.tenant == "light" and each.served >= 12.0 for each in beat.services.get("interactive", ()))

    for each in (worker, second):
        if each.worker._engine.stats.step:
            await each.wait_for_heartbeat(has_served)
