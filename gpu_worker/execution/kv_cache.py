"""The memory that holds keys and values, in blocks, and how many blocks it has."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.config import ModelConfig
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

# The share of free memory that an unsized cache takes. A CPU's memory is shared with everything else on the machine.
_SHARE_OF_FREE = {"cpu": 0.25, "cuda": 0.85}


@dataclass(frozen=True, slots=True)
class KVCache:
    """One key and one value tensor a layer, `[num_blocks, block_size, num_kv_heads, head_dim]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    num_blocks: int
    block_size: int


def allocate_kv_cache(
    config: RunnerConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate the cache, sized by the settings or else by free memory. Its contents are undefined.

    Raises:
        ConfigError: It cannot hold even one sequence of `max_model_len`.
    """
    block_bytes = bytes_per_block(config.block_size, model, dtype)
    num_blocks = choose_num_blocks(config, max_model_len, block_bytes, free_memory_bytes(device), device.type)
    logger.info(
        "KV cache: %d blocks of %d tokens, %.0f MB in %s",
        num_blocks,
        config.block_size,
        num_blocks * block_bytes / 1e6,
        dtype,
    )
    shape = (num_blocks, config.block_size, model.num_kv_heads, model.head_dim)

    def tensors() -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]

    return KVCache(tensors(), tensors(), num_blocks, config.block_size)


def bytes_per_block(block_size: int, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory of one block over all layers."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def choose_num_blocks(
    config: RunnerConfig, max_model_len: int, block_bytes: int, free_bytes: int, device_type: str
) -> int:
    """Return how many blocks to allocate: as set, else what the memory holds and the batch can use at most.

    Raises:
        ConfigError: They do not hold one sequence of `max_model_len`.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks, variable = config.num_blocks, "HEADRACE_NUM_BLOCKS"
    else:
        pool_bytes = config.kv_cache_bytes or int(free_bytes * _SHARE_OF_FREE.get(device_type, 0.25))
        num_blocks = min(pool_bytes // block_bytes, blocks_per_sequence * config.max_num_seqs)
        variable = "HEADRACE_KV_CACHE_BYTES"
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            variable,
            f"the KV cache would hold {num_blocks * config.block_size} tokens, but a sequence may have "
            f"{max_model_len}. Allow {blocks_per_sequence * block_bytes} bytes ({blocks_per_sequence} blocks), or "
            f"lower HEADRACE_MAX_MODEL_LEN to {max(num_blocks * config.block_size, 1)}",
        )
    return num_blocks


def free_memory_bytes(device: torch.device) -> int:
    """Return how much memory of the device nobody uses, within this process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_free_bytes(), _control_group_free_bytes())


def _machine_free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _control_group_free_bytes() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
