"""What the user is told when the device runs out of memory while a runner is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu_worker.execution.memory.budget import shown_bytes
from gpu_worker.execution.memory.probe import DeviceMemory
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import ConfigError


@contextmanager
def reporting_out_of_memory(variable: str, when: str, memory: DeviceMemory, remedy: str) -> Iterator[None]:
    """Turn the device's error into one line that says what is free and what would help.

    Args:
        variable: The setting to change.
        when: What the memory was for.
        memory: Of the device.
        remedy: What the user can do.

    Raises:
        ConfigError: The device ran out of memory within the block.
    """
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
