"""The memory that holds keys and values, in blocks, and how many blocks a set size means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.config import ModelConfig
from kernels.layer_cache import LayerCache, StackedCaches, allocate_layer_cache, allocate_layer_caches
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCache:
    """The caches of all layers, which have the same blocks: one by one, and stacked."""

    layers: Sequence[LayerCache]
    stacked: StackedCaches
    num_blocks: int
    block_size: int


def allocate_kv_cache(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate a cache of keys and values of type `dtype`. Its contents are undefined."""
    sizes = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
    stacked = allocate_layer_caches(model.num_cached_layers, *sizes, dtype, device)
    return KVCache(stacked.layers(), stacked, num_blocks, block_size)


def bytes_per_block(block_size: int, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory of one block over all layers, scales included."""
    sizes = (1, block_size, model.num_kv_heads, model.head_dim)
    return model.num_cached_layers * allocate_layer_cache(*sizes, dtype, torch.device("meta")).block_bytes


def fixed_num_blocks(config: RunnerConfig, demand: CacheDemand) -> tuple[str, int] | None:
    """Return the variable that sets the cache's size and the blocks that it means; None when the memory decides.

    Blocks that take no memory, of a model without a cache, are as many as the batch can use.

    Raises:
        ConfigError: They do not hold the longest sequence.
    """
    if config.num_blocks is not None:
        variable, num_blocks = "HEADRACE_NUM_BLOCKS", config.num_blocks
    elif demand.block_bytes == 0:
        variable, num_blocks = "HEADRACE_NUM_BLOCKS", demand.blocks_per_sequence * config.max_num_seqs
    elif config.kv_cache_bytes is not None:
        variable, num_blocks = "HEADRACE_KV_CACHE_BYTES", config.kv_cache_bytes // demand.block_bytes
    else:
        return None
    if num_blocks < demand.blocks_per_sequence:
        length = demand.len_within(num_blocks)
        raise ConfigError(
            variable,
            f"the KV cache would hold {num_blocks * demand.block_size} tokens, but a sequence may have "
            f"{demand.max_model_len}. Allow {demand.least_bytes} bytes ({demand.blocks_per_sequence} blocks)"
            + ("" if length is None else f", or lower HEADRACE_MAX_MODEL_LEN to {length}"),
        )
    return variable, num_blocks
