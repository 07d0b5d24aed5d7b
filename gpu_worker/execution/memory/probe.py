"""Measures what a model and its largest step take of a device's memory, before the KV cache takes the rest.

Owns nothing but the first reading. The runner that is measured works on a cache of few blocks and is dropped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from gpu_worker.execution.memory.budget import MemoryUse, shown_bytes
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import ConfigError


class DeviceMemory:
    """Reads the memory of a CUDA device, in bytes."""

    def __init__(self, device: torch.device) -> None:
        """Open the device, so that its driver context is there before the first reading."""
        self._device = device
        torch.cuda.mem_get_info(device)

    def total(self) -> int:
        """Return what the device has."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """Return the free memory."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        """Return what this process's tensors and the allocator's cache take."""
        return torch.cuda.memory_reserved(self._device)

    def peak_reserved(self) -> int:
        """Return the most of that since `reset_peak`."""
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        """Begin to look for the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_cached(self) -> None:
        """Give back what holds no tensor."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class ProbedRunner(Protocol):
    """What a runner can do before it serves."""

    def warm_up(self) -> None:
        """Execute all kinds of steps, the largest included."""

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture decode steps."""


class MemoryProbe:
    """Takes readings from the start of the process to the end of loading and of the largest step.

    Attributes:
        used_before: Of that, in use when the probe was made.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        """Take the first reading; make it before anything is loaded."""
        self._memory = memory
        self._free_before = memory.free()
        self._reserved_before = memory.reserved()
        self.device_bytes = memory.total()
        self.used_before = self.device_bytes - self._free_before

    def measure(
        self, make_runner: Callable[[], ProbedRunner], cache_bytes: int, progress: Callable[[int, int], None]
    ) -> MemoryUse:
        """Run the largest step and capture all graphs, for once, after the weights have been loaded.

        All graphs are captured, not the largest alone: what each of the others adds differs by driver and kernel.
        """
        memory = self._memory
        memory.release_cached()
        loaded = memory.reserved()
        memory.reset_peak()
        runner = make_runner()
        made = memory.reserved()
        runner.warm_up()
        peak = memory.peak_reserved()
        memory.release_cached()
        free = memory.free()
        runner.capture_graphs(progress)
        memory.release_cached()
        graphs = free - memory.free()
        del runner
        memory.release_cached()
        grown = self._free_before - memory.free()
        return MemoryUse(
            weights=loaded - self._reserved_before,
            rows=max(0, made - loaded - cache_bytes),
            activations=max(0, peak - max(made, loaded + cache_bytes)),
            graphs=max(0, graphs),
            other=max(0, grown - (memory.reserved() - self._reserved_before)),
        )


@contextmanager
def reporting_out_of_memory(variable: str, when: str, memory: DeviceMemory, remedy: str) -> Iterator[None]:
    """Turn the device's error into a `ConfigError` that names the free memory, its purpose, and a remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = memory.free(), memory.total()
        raise ConfigError(
            variable,
            f"the device ran out of memory {when}: {shown_bytes(free)} of {shown_bytes(total)} are free, "
            f"{shown_bytes(memory.reserved())} are ours. To make it fit, {remedy}",
        ) from None


def smaller_model(weights_bytes: int, dtype: str) -> str:
    """Suggest less weights."""
    return (
        f"end other processes on the device, or serve a quantized or a smaller model: "
        f"these weights need {shown_bytes(weights_bytes)} in {dtype}"
    )


def smaller_step(config: RunnerConfig) -> str:
    """Suggest half of the tokens or of the sequences of a step, as far as settings allow."""
    remedies = []
    if config.max_num_batched_tokens // 2 >= config.max_num_seqs:
        remedies.append(f"lower HEADRACE_MAX_NUM_BATCHED_TOKENS to {config.max_num_batched_tokens // 2}")
    if config.max_num_seqs > 1:
        remedies.append(f"lower HEADRACE_MAX_NUM_SEQS to {config.max_num_seqs // 2}")
    return ", or ".join(remedies) or "serve a quantized or a smaller model"


def smaller_share(config: RunnerConfig) -> str:
    """Suggest a smaller KV cache, by the setting that sizes it."""
    if config.num_blocks is not None or config.kv_cache_bytes is not None:
        return "lower HEADRACE_NUM_BLOCKS or HEADRACE_KV_CACHE_BYTES"
    return f"lower HEADRACE_GPU_MEMORY_UTILIZATION to {max(0.05, config.gpu_memory_utilization - 0.05):.2f}"
