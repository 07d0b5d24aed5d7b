"""What a model runner is built from, and the choices that `auto` stands for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.layers.ranks.settings import RankSettings
from shared.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# From this compute capability on, instructions convert to and from fp8.
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class RunnerConfig(RankSettings):
    """Settings of a model runner, of one rank where a model is divided.

    Attributes:
        model: Hugging Face directory.
        num_blocks: KV blocks; None sizes the cache by memory.
        kv_cache_bytes: Memory for the KV cache; None takes a share of the free memory.
        gpu_memory_utilization: Share of a GPU's memory that this process may use in all.
        max_num_seqs: Sequences in a step at most.
        max_num_batched_tokens: Tokens in a step at most; no fewer than `max_num_seqs`.
        max_model_len: Tokens of a sequence at most; None is what the model was made for.
        max_draft_tokens: Drafts that a sequence verifies in a step at most; 0 where there is no proposer.
        proposer_bytes: Of the KV cache's memory, what the proposer of drafts will take, however large the cache is.
        proposer_block_bytes: What it will take for each block of the KV cache.
        state_checkpoint_ratio: Bytes for checkpoints of recurrent states for each byte of keys and values.
        tapped_layers: Layers of the model that the proposer reads.
        keeps_all_tokens: Layers with a window keep all tokens too, for a draft model, whose plans know no windows.
        cuda_graphs: Steps that a GPU captures: `off`, `decode`, or `all`, which has small steps with prompt tokens too.
        takes_images: A model is served with its vision tower; not by several stages, nor ranks that share tokens or
            divide sequences.
        max_loras: Adapters that may be beside the model at once.
    """

    model: Path
    dtype: str = "auto"
    device: str = "cpu"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    num_threads: int | None = None
    max_draft_tokens: int = 0
    proposer_bytes: int = 0
    proposer_block_bytes: int = 0
    state_checkpoint_ratio: float = 0.9
    tapped_layers: tuple[int, ...] = ()
    cuda_graphs: str = "all"
    keeps_all_tokens: bool = False
    takes_images: bool = False
    max_loras: int = 0


def choose_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to run in.

    `auto` is the checkpoint's own, except on a CPU: half precision is slow there without instructions for it, so
    float16 runs in float32, and so does bfloat16 on processors without bfloat16 dot products. Matrices keep their
    16 bits even so, where the compiled kernels are there to widen them.

    Raises:
        ConfigError: The name is not a supported dtype.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError("HEADRACE_DTYPE", f"{name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type != "cpu":
        return checkpoint
    return torch.bfloat16 if checkpoint == torch.bfloat16 and _has_bfloat16_dot_products() else torch.float32


def choose_draft_dtype(model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to draft in: drafts are verified, so they need not be exact where exactness takes longer."""
    is_slow = device.type == "cpu" and model == torch.float32 and _has_bfloat16_dot_products()
    return torch.bfloat16 if is_slow else model


def choose_kv_cache_dtype(name: str, model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of keys and values in the cache; `auto` is the model's own.

    Raises:
        ConfigError: The name is not a supported dtype, or the device cannot convert to it.
    """
    if name == "auto":
        return model
    if name not in KV_CACHE_DTYPES:
        raise ConfigError("HEADRACE_KV_CACHE_DTYPE", f"{name!r} is not one of auto, {', '.join(KV_CACHE_DTYPES)}")
    if name == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
            problem = f"fp8 needs a GPU of compute capability {needed} or more, this one has {found}; int8 runs on it"
            raise ConfigError("HEADRACE_KV_CACHE_DTYPE", problem)
    return KV_CACHE_DTYPES[name]


def choose_num_threads(requested: int | None, num_ranks: int = 1) -> int:
    """Return how many threads CPU operations of a rank use: as requested, else its part of all usable cores but one.

    One core is left to the gateway, the queue and our own NATS thread. A team of threads waits for its slowest member
    many times in a step, so a step gets several times slower as soon as another process takes one of its cores.
    """
    return requested or max(1, (num_usable_cores() - (num_ranks == 1)) // num_ranks)


def num_usable_cores() -> int:
    """Return the cores this process may use, by its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _has_bfloat16_dot_products() -> bool:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
