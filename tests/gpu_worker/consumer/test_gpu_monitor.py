"""Readings of a GPU, by the real NVML binding over a driver library that the test builds; no GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.consumer.gpu_monitor import GpuMonitor

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
