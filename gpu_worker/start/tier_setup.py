"""Builds the tiers below the device's memory that the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.start.config import WorkerConfig
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.tiers.block_tiers import BlockTiers


def check_tiers(config: WorkerConfig) -> None:
    """Refuse tiers that cannot be, before anything is loaded.

    Raises:
        ConfigError: They are asked for.
    """
    if config.kv_host_bytes is None:
        return
    problem = None
    if config.simulate is not None:
        problem = "a simulated engine keeps no keys and values"
    elif not config.enable_prefix_caching:
        problem = "what is kept is found by the prefix cache, which HEADRACE_ENABLE_PREFIX_CACHING turns off"
    elif config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        problem = "a model that is divided among several ranks has no tiers below the device's memory yet"
    elif config.kv_host_bytes > (free := free_host_bytes()):
        problem = f"only {free} bytes of memory are free; lower it, and leave some for others"
    if problem is not None:
        raise ConfigError("HEADRACE_KV_HOST_BYTES", f"is {config.kv_host_bytes}, but {problem}")


def build_tiers(config: WorkerConfig, runner: TorchModelRunner) -> BlockTiers | None:
    """Build the tiers of a runner; None where none are asked for.

    Raises:
        ConfigError: They cannot be built.
    """
    if config.kv_host_bytes is None:
        return None
    from gpu_worker.execution.tiers.block_tiers import BlockTiers
    from gpu_worker.execution.tiers.host_tier import HostTier

    groups = runner.block_contents
    return BlockTiers(groups, runner.block_size, HostTier(groups, config.kv_host_bytes))
