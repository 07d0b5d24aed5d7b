"""The launches of the kernels with a recurrent state that compile checks look at, in shapes of published models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.causal_conv.triton_kernel import causal_conv_triton
from kernels.gated_delta import DeltaSizes, DeltaWeights
from kernels.gated_delta.triton_kernel import gated_delta_triton
from kernels.gpu_config import Gpu
from kernels.matrix_state.walk import StateStep
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


def launch_rule(
    form: Callable[..., torch.Tensor],
    sizes: DeltaSizes | SsdSizes,
    gpu: Gpu,
    length: int,
    *,
    saves: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    of_heads = [empty(sizes.state_shape.num_heads, dtype=torch.float32) for _ in range(3)]
    weights = SsdWeights(*of_heads) if isinstance(sizes, SsdSizes) else DeltaWeights(*of_heads[:2])
    states = empty(2, *sizes.state_shape, dtype=torch.float32)
    features, gates = empty(length, sizes.num_features, dtype=dtype), empty(length, sizes.num_gates, dtype=dtype)
    return form(StateStep(features, gates, weights, sizes, states, rows_of(length, saves=saves)), gpu)


launch_delta = partial(launch_rule, gated_delta_triton, SIZES)


def launch_conv(length: int, *, saves: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    channels = SIZES.num_features
    features, weight = empty(length, channels, dtype=dtype), empty(4, channels, dtype=dtype)
    inputs = features, weight, None, empty(2, 3, channels, dtype=torch.float32)
    return causal_conv_triton(*inputs, rows_of(length, saves=saves))


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    delta = partial(launch_delta, gpu)
    ssd, small_ssd = (partial(launch_rule, ssd_triton, sizes, gpu) for sizes in (SSD_SIZES, SMALL_SSD_SIZES))
    return {
        "delta_steps": partial(delta, 1),
        "delta_chunks": partial(delta, 64),
        "delta_steps_copied": partial(delta, 1, saves=True),
        "delta_chunks_copied": partial(delta, 64, saves=True),
        "ssd_steps": partial(ssd, 1),
        "ssd_chunks": partial(ssd, 64),
        "ssd_steps_copied": partial(ssd, 1, saves=True),
        "ssd_chunks_copied": partial(ssd, 64, saves=True),
        "small_ssd_steps": partial(small_ssd, 1),
        "small_ssd_chunks": partial(small_ssd, 64),
        "conv_step": partial(launch_conv, 1),
        "conv": partial(launch_conv, 64),
        "conv_copied": partial(launch_conv, 64, saves=True),
    }
