"""The launches of the kernels with a recurrent state that compile checks look at, in the shapes of Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.causal_conv.triton_kernel import causal_conv_triton
from kernels.gated_delta import DeltaSizes, DeltaWeights
from kernels.gated_delta.triton_kernel import gated_delta_triton
from kernels.gpu_config import Gpu
from tests.kernels.state_batches import state_rows

SIZES = DeltaSizes(16, 32, 128, 128)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def launch_delta(gpu: Gpu, length: int) -> torch.Tensor:
    weights = DeltaWeights(empty(32, dtype=torch.float32), empty(32, dtype=torch.float32))
    states = empty(2, 32, 128, 128, dtype=torch.float32)
    rows = state_rows([length], [0], [1])
    return gated_delta_triton(empty(length, SIZES.num_features), empty(length, 64), weights, SIZES, states, rows, gpu)


def launch_conv(length: int) -> torch.Tensor:
    channels = SIZES.num_features
    inputs = empty(length, channels), empty(4, channels), None, empty(2, 3, channels, dtype=torch.float32)
    return causal_conv_triton(*inputs, state_rows([length], [0], [1]))


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "delta_steps": partial(launch_delta, gpu, 1),
        "delta_chunks": partial(launch_delta, gpu, 64),
        "conv_step": partial(launch_conv, 1),
        "conv": partial(launch_conv, 64),
    }
