"""The bitmask launch that compile checks look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu
from kernels.logits_bitmask.triton_kernel import forbid_tokens_triton


def launches(gpu: Gpu) -> dict[str, Callable[[], None]]:
    logits = torch.empty(2, 128_256)
    masks = torch.empty(2, 128_256 // 32, dtype=torch.int32)
    return {"llama3": partial(forbid_tokens_triton, logits, torch.arange(2), masks)}
