"""Builds the tiers below the device's memory that the settings ask for."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.execution.memory.state_sizes import CHECKPOINT_TOKENS
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.start.config import WorkerConfig
from shared.errors import ConfigError
from shared.features import own_version

if TYPE_CHECKING:
    from gpu_worker.execution.memory.block_bytes import BlockBytes
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.tiers.block_tiers import BlockTiers
    from gpu_worker.execution.tiers.file_format import Maker

_log = logging.getLogger(__name__)

STAGING_BYTES = 256_000_000
"""Of the host's memory where files alone are asked for: contents lie there until they are written."""


def check_tiers(config: WorkerConfig) -> None:
    """Refuse tiers that are asked for and cannot be, before anything is loaded, with `ConfigError`."""
    asked = asked_tier(config)
    if asked is None:
        return
    variable, value = asked
    problem = None
    if config.simulate is not None:
        problem = "a simulated engine keeps no keys and values"
    elif not config.enable_prefix_caching:
        problem = "tiers need the prefix cache, which HEADRACE_ENABLE_PREFIX_CACHING turns off"
    elif (needed := config.kv_host_bytes or STAGING_BYTES) > (free := free_host_bytes()):
        problem = f"{needed} bytes of memory are wanted, and {free} are free"
    if problem is not None:
        raise ConfigError(variable, f"is {value}, but {problem}")


def build_tiers(config: WorkerConfig, runner: TorchModelRunner) -> BlockTiers | None:
    """Build the tiers of a runner; None where none are asked for, `ConfigError` if they cannot be built."""
    if asked_tier(config) is None:
        return None
    from gpu_worker.execution.memory.budget import shown_bytes
    from gpu_worker.execution.tiers.block_files import BlockFiles
    from gpu_worker.execution.tiers.block_tiers import BlockTiers
    from gpu_worker.execution.tiers.file_store import open_store
    from gpu_worker.execution.tiers.host_tier import HostTier
    from gpu_worker.execution.tiers.nixl_transport import make_agent
    from gpu_worker.execution.tiers.transfer import Transfer

    groups = runner.block_contents
    host_bytes, is_shared = config.kv_host_bytes or STAGING_BYTES, config.role is not None
    host = HostTier(groups, host_bytes, config.kv_retained_share, is_shared=is_shared)
    files = transfer = None
    assert config.model is not None
    make_maker = made_once(partial(_maker, Path(config.model), groups, _arithmetic(runner)))
    if config.role is not None:
        nixl = make_agent(host.regions, max(group.row_bytes for group in groups))
        where = (config.kv_address, config.kv_lease_s)
        transfer = Transfer(groups, runner.block_size, host, *where, make_maker, nixl)
    if config.kv_disk_path is not None:
        tokens = [runner.block_size] * (1 + len(runner.windows)) + [CHECKPOINT_TOKENS]
        sizes = (tokens[: len(groups)], config.kv_disk_bytes)
        files = BlockFiles(open_store(config.kv_disk_path), groups, *sizes, host, make_maker, config.kv_retained_share)
    _log.info("KV blocks are kept in the host's memory: %s", shown_bytes(host.num_bytes))
    return BlockTiers(groups, runner.block_size, host, files, transfer)


def asked_tier(config: WorkerConfig) -> tuple[str, object] | None:
    """Return the setting that asks for tiers, and its value; None where none does."""
    if config.kv_host_bytes is not None:
        return "HEADRACE_KV_HOST_BYTES", config.kv_host_bytes
    if config.kv_disk_path is not None:
        return "HEADRACE_KV_DISK_PATH", config.kv_disk_path
    return None if config.role is None else ("HEADRACE_ROLE", config.role)


def made_once(make: Callable[[], Maker]) -> Callable[[], Maker]:
    """Return a function for several threads, of which one makes what all get: it reads all weights."""
    making, made = threading.Lock(), cache(make)

    def get() -> Maker:
        with making:
            return made()

    return get


def _maker(model: Path, groups: list[BlockBytes], arithmetic: str) -> Maker:
    """Name what computes contents: the weights, and how bits come about and lie."""
    from gpu_worker.execution.tiers.file_format import Maker

    layouts = tuple(
        hashlib.sha256(f"{arithmetic}; {group.layout}; {group.row_bytes}".encode()).digest() for group in groups
    )
    return Maker(weights_digest(model), layouts)


def _arithmetic(runner: TorchModelRunner) -> str:
    """Describe what the last bits of a result depend on: contents with other bits would make answers differ."""
    import torch

    device = runner.model.device
    if device.type == "cuda":
        computes = torch.cuda.get_device_name(device)
    else:
        computes = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    return f"headrace {own_version()}, torch {torch.__version__}, {runner.dtype}, {computes}"


_PATTERNS = ("config.json", "*.safetensors", "quant*config*.json")


def weights_digest(model: Path) -> bytes:
    """Return a SHA-256 over all bytes of the weight files and their configuration, at about 1 s a GB."""
    gguf = find_gguf(model)
    digest = hashlib.sha256()
    for path in [gguf] if gguf else sorted(path for pattern in _PATTERNS for path in model.glob(pattern)):
        with path.open("rb") as file:
            # A folder says by names which file is which; a GGUF file may be called anything.
            digest.update(path.name.encode() if gguf is None else b"gguf")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
