"""NVML readings of the worker's GPU: utilization, memory, temperature, power, energy.

NVML is the driver's own library, reached through the package `nvidia-ml-py` (`headrace[gpu]`). Without the package, the
driver or the right to ask, there are no readings, which is logged once; a figure that a device does not have is None.
Reading takes up to milliseconds, so it is done in a thread, once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from shared.worker_metrics import GpuReading

INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class GpuMonitor:
    """Reads one GPU."""

    def __init__(self, uuid: str | None) -> None:
        """Read the GPU with this UUID, as NVML spells it; None on a worker without a GPU."""
        self._uuid = uuid
        self._nvml: Any = None
        self._handle: Any = None
        self.readings: tuple[GpuReading, ...] = ()
        self._watts: float | None = None
        self._read_at = 0.0

    def watts(self) -> float | None:
        """Return the mean power between the last two readings; None where the device does not tell."""
        return self._watts

    async def refresh(self) -> None:
        """Read, unless there is no GPU."""
        if self._uuid is not None:
            before, began = self.readings, self._read_at
            self.readings = await asyncio.to_thread(self._read, self._uuid)
            self._read_at = time.monotonic()
            self._watts = _power(before, self.readings, self._read_at - began)

    def _read(self, uuid: str) -> tuple[GpuReading, ...]:
        if self._handle is None and not self._open(uuid):
            return ()
        nvml, handle = self._nvml, self._handle
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return (
            GpuReading(
                uuid,
                utilization=self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
                memory_used_bytes=None if memory is None else memory.used,
                memory_total_bytes=None if memory is None else memory.total,
                temperature_celsius=self._ask(
                    lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
                ),
                power_watts=self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
                energy_j=self._ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
            ),
        )

    def _open(self, uuid: str) -> bool:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except ImportError:
            reason = "the package nvidia-ml-py is missing: pip install 'headrace[gpu]'"
        except pynvml.NVMLError as error:
            reason = f"NVML: {error}"
        else:
            self._nvml = pynvml
            return True
        self._uuid = None
        _log.warning("no metrics of the GPU: %s", reason)
        return False

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:
            return None


def _power(before: tuple[GpuReading, ...], now: tuple[GpuReading, ...], passed_s: float) -> float | None:
    """Return the mean watts between two readings of the energy counter, else the device's momentary power."""
    if not now:
        return None
    energy_j, earlier_j = now[0].energy_j, before[0].energy_j if before else None
    if energy_j is None or earlier_j is None or passed_s <= 0 or energy_j < earlier_j:
        return now[0].power_watts
    return (energy_j - earlier_j) / passed_s
