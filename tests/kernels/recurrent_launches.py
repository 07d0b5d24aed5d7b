"""The launches of the kernels with a recurrent state that compile checks look at, in shapes of published models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.causal_conv.triton_kernel import causal_conv_triton
from kernels.gated_delta import DeltaSizes, DeltaWeights
from kernels.gated_delta.triton_kernel import gated_delta_triton
from kernels.gpu_config import Gpu
from kernels.ssd import SsdSizes, SsdWeights
from kernels.ssd.triton_kernel import ssd_triton
from kernels.state_rows import StateRows
from tests.kernels.state_batches import state_rows

SIZES = DeltaSizes(16, 32, 128, 128)
SSD_SIZES = SsdSizes(48, 64, 1, 256)
"""Of Falcon-H1 1.5B; Nemotron-H's states have half the rows."""
SMALL_SSD_SIZES = SsdSizes(64, 64, 8, 128)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def rows_of(length: int, *, saves: bool) -> StateRows:
    return state_rows([length], [0], [1], saves=[[(length, 0)]] if saves else None)


def launch_delta(gpu: Gpu, length: int, *, saves: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weights = DeltaWeights(empty(32, dtype=torch.float32), empty(32, dtype=torch.float32))
    states = empty(2, 32, 128, 128, dtype=torch.float32)
    rows = rows_of(length, saves=saves)
    features, gates = empty(length, SIZES.num_features, dtype=dtype), empty(length, 64, dtype=dtype)
    return gated_delta_triton(features, gates, weights, SIZES, states, rows, gpu)


def launch_ssd(gpu: Gpu, sizes: SsdSizes, length: int, *, saves: bool = False) -> torch.Tensor:
    of_heads = (empty(sizes.num_heads, dtype=torch.float32) for _ in range(3))
    states = empty(2, sizes.num_heads, sizes.state_size, sizes.head_dim, dtype=torch.float32)
    features, steps = empty(length, sizes.num_features), empty(length, sizes.num_heads)
    return ssd_triton(features, steps, SsdWeights(*of_heads), sizes, states, rows_of(length, saves=saves), gpu)


def launch_conv(length: int, *, saves: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    channels = SIZES.num_features
    features, weight = empty(length, channels, dtype=dtype), empty(4, channels, dtype=dtype)
    inputs = features, weight, None, empty(2, 3, channels, dtype=torch.float32)
    return causal_conv_triton(*inputs, rows_of(length, saves=saves))


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "delta_steps": partial(launch_delta, gpu, 1),
        "delta_chunks": partial(launch_delta, gpu, 64),
        "delta_steps_copied": partial(launch_delta, gpu, 1, saves=True),
        "delta_chunks_copied": partial(launch_delta, gpu, 64, saves=True),
        "ssd_steps": partial(launch_ssd, gpu, SSD_SIZES, 1),
        "ssd_chunks": partial(launch_ssd, gpu, SSD_SIZES, 64),
        "ssd_steps_copied": partial(launch_ssd, gpu, SSD_SIZES, 1, saves=True),
        "ssd_chunks_copied": partial(launch_ssd, gpu, SSD_SIZES, 64, saves=True),
        "small_ssd_steps": partial(launch_ssd, gpu, SMALL_SSD_SIZES, 1),
        "small_ssd_chunks": partial(launch_ssd, gpu, SMALL_SSD_SIZES, 64),
        "conv_step": partial(launch_conv, 1),
        "conv": partial(launch_conv, 64),
        "conv_copied": partial(launch_conv, 64, saves=True),
    }
