"""The launches of attention that the tuner chooses among, each as often as its code differs from the others'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu
from kernels.paged_attention.triton_config import ChunkConfig, SplitConfig
from ops.bench.gpu.case import Entry
from ops.bench.gpu.tune import attention
from tests.kernels.attention_launches import launch


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    """Name each launch by its table, head size and entry."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for tuning in (*attention.SPLIT_ATTENTION, *attention.SPLIT_ATTENTION_8BIT, *attention.CHUNK_ATTENTION):
        head_dim = tuning.key or 0
        dtype = torch.float8_e4m3fn if tuning.table == "SPLIT_ATTENTION_8BIT" else torch.bfloat16
        for entry in tuning.candidates:
            name = f"{tuning.label} {code_of(entry)}"
            if tuning.table == "CHUNK_ATTENTION":
                found[name] = partial(launch, gpu, 1, 64, head_dim, chunk=ChunkConfig(**entry))
            else:
                found[name] = partial(launch, gpu, 256, 1, head_dim, cache_dtype=dtype, split=SplitConfig(**entry))
    return found


def code_of(entry: Entry) -> str:
    """Return what of an entry is compiled in."""
    return " ".join(f"{name}={value}" for name, value in entry.items() if name != "programs_per_multiprocessor")
