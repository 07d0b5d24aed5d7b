"""The launches over a KV cache in eight bits that compile checks look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu, GpuGeneration
from tests.kernels.attention_launches import launch
from tests.kernels.elementwise_launches import launch_rope


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    """Decodes, drafts, chunks and the write; with fp8 only where the GPU has instructions to convert it."""
    dtypes = {"int8": torch.int8}
    if gpu.generation is not GpuGeneration.AMPERE:
        dtypes["fp8"] = torch.float8_e4m3fn
    shapes = {
        "decode_one": (1, 1, 128),
        "decode_many": (256, 1, 128),
        "decode_64": (256, 1, 64),
        "decode_256": (64, 1, 256, 1024, 50.0),
        "verify": (256, 5, 128),
        "chunk_64": (1, 64, 64),
        "chunk_128": (1, 64, 128),
        "chunk_256_capped": (1, 64, 256, 1024, 50.0),
    }
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name, dtype in dtypes.items():
        found |= {f"{label}_{name}": partial(launch, gpu, *shape, cache_dtype=dtype) for label, shape in shapes.items()}
        found |= {
            f"verify_trees_{name}": partial(launch, gpu, 256, 16, 128, cache_dtype=dtype, has_trees=True),
            f"chunk_128_trees_{name}": partial(launch, gpu, 1, 64, 128, cache_dtype=dtype, has_trees=True),
        }
        found[f"rope_{name}"] = partial(launch_rope, True, dtype)
    return found
